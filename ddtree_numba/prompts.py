"""Where prompts come from, and how they become ids: all of it before any weight is read."""

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddtree_numba.jsonl import read_bytes
from ddtree_numba.model.config import ModelConfig
from ddtree_numba.options import UsageError
from ddtree_numba.reasoning import ReasoningParser
from ddtree_numba.request import refusal
from ddtree_numba.screen import Screen
from ddtree_numba.tokenizer import Tokenizer

if TYPE_CHECKING:  # it needs jinja2
    from ddtree_numba.chat import Chat

BYTE_ORDER_MARK = "\ufeff"
# What a record holds one of.
KINDS = {"prompt": (str, "string"), "messages": (list, "list"), "token_ids": (list, "list")}


@dataclass(frozen=True)
class Prompt:
    """One prompt: its number in the input and its ids, or why it cannot be answered."""

    index: int
    token_ids: list[int]
    error: str | None = None


def read_prompt(options: argparse.Namespace, screen: Screen) -> str:
    """The text of PROMPT, --prompt-file or standard input: the same for the same bytes."""
    if options.prompt_file is not None:
        source = options.prompt_file
        data = read_bytes(source)
    elif options.prompt == "-":
        source = "standard input"
        if sys.stdin.isatty():
            screen.note("reading the prompt; end it with Ctrl-D")
        data = sys.stdin.buffer.read()
    else:
        # Python keeps bytes of the command line that are no UTF-8 as lone surrogates.
        source, data = "PROMPT", options.prompt.encode("utf-8", "surrogateescape")
    return clean_text(data, source)


def clean_text(data: bytes, source: str) -> str:
    """UTF-8 text without a leading byte order mark and without one final line ending, which files
    and `echo` add; nothing else is changed."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        ) from None
    text = text.removeprefix(BYTE_ORDER_MARK)
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


class Encoder:
    """Turns texts, messages and ids into ids that the model can take, or refuses them."""

    def __init__(
        self,
        options: argparse.Namespace,
        tokenizer: Tokenizer,
        chat: "Chat | None",
        config: ModelConfig,
    ) -> None:
        self.options, self.tokenizer, self.chat = options, tokenizer, chat
        self.config = config

    def text(self, text: str) -> list[int]:
        """Ids of a prompt: as it is, or as a user's message with --chat."""
        if not text:
            raise UsageError("the prompt is empty: give at least one character")
        if self.chat is None:
            return self._checked(self.tokenizer.encode(text, self.options.allow_special))
        return self.messages([{"role": "user", "content": text}])

    def messages(self, messages: list[Any], tools: Any = None) -> list[int]:
        """Ids of a conversation; --system comes first unless the conversation has its own."""
        assert self.chat is not None
        if not messages or not _are_objects(messages):
            raise UsageError("messages must be a list of objects, not empty")
        for message in messages:
            _check_message(message)
        if tools is not None and not _are_objects(tools):
            raise UsageError("tools must be a list of objects")
        if self.options.system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.options.system}, *messages]
        return self._checked(self.chat.render(messages, self.options.thinking, tools))

    def ids(self, token_ids: list[Any]) -> list[int]:
        """Ids as they are."""
        if not all(type(token_id) is int for token_id in token_ids):
            raise UsageError("token_ids must be integers")
        return self._checked(token_ids)

    def record(self, index: int, record: str | dict[str, Any]) -> Prompt:
        """One input record; what cannot be answered becomes a Prompt with an error.

        UsageError for a kind of record that the options exclude: all of its kind would fail.
        """
        if isinstance(record, str):
            record = {"prompt": record}
        kind, complaint = "token_ids", "cannot be used with --chat"
        if self.chat is None:
            kind, complaint = "messages", "need --chat"
        if [key for key in KINDS if key in record] == [kind]:
            raise UsageError(f"{self.options.input}, record {index}: {kind} {complaint}")
        try:
            return Prompt(index, self._record(record))
        except ValueError as error:
            return Prompt(index, [], str(error))
        except RecursionError:
            return Prompt(index, [], "messages or tools are nested too deep")

    def parser(self, prompt_ids: list[int]) -> ReasoningParser | None:
        """A parser for an answer whose reasoning is to be kept apart."""
        if not self.options.thinking or self.options.raw:
            return None
        return ReasoningParser.after_prompt(self.tokenizer, prompt_ids)

    def _record(self, record: dict[str, Any]) -> list[int]:
        found = [key for key in KINDS if key in record]
        if len(found) != 1:
            raise UsageError(f"a record needs exactly one of {', '.join(KINDS)}")
        (key,) = found
        kind, name = KINDS[key]
        if not isinstance(record[key], kind):
            raise UsageError(f"{key} must be a {name}")
        tools = record.get("tools")
        if key == "messages":
            return self.messages(record[key], tools)
        if tools is not None:
            raise UsageError("tools go with messages only")
        return self.text(record[key]) if key == "prompt" else self.ids(record[key])

    def _checked(self, token_ids: list[int]) -> list[int]:
        error = refusal(token_ids, self.config.max_position_embeddings, self.config.vocab_size)
        if error is not None:
            raise UsageError(error)
        return token_ids


def _check_message(message: dict[str, Any]) -> None:
    """UsageError for a message that a template would render without what it says."""
    if not isinstance(message.get("role"), str):
        raise UsageError("a message needs a role")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list) or not _are_objects(content):
        raise UsageError("the content of a message must be text, or a list of text parts")
    for part in content:
        if part.get("type") != "text":
            raise UsageError(f"content of type {part.get('type')!r}: this engine reads text only")
        if not isinstance(part.get("text"), str):
            raise UsageError("a text part of a message has no text")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
