"""Where prompts come from, and how they become ids: all of it before any weight is read."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_numba.options import UsageError

if TYPE_CHECKING:
    from ddtree_numba.chat import Chat
    from ddtree_numba.tokenizer import Tokenizer

BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Prompt:
    """One prompt: its number in the input and its ids, or why it cannot be answered."""

    index: int
    token_ids: list[int]
    error: str | None = None


def read_prompt(options: argparse.Namespace) -> str:
    """The text of PROMPT, --prompt-file or standard input: the same for the same bytes."""
    if options.prompt_file is not None:
        source = options.prompt_file
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise UsageError(f"{source}: {error.strerror or error}") from None
    elif options.prompt == "-":
        source = "standard input"
        if sys.stdin.isatty() and not options.quiet:
            print("reading the prompt; end it with Ctrl-D", file=sys.stderr)
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
        self, options: argparse.Namespace, tokenizer: "Tokenizer", chat: "Chat | None", limits: Any
    ) -> None:
        self.options, self.tokenizer, self.chat = options, tokenizer, chat
        self.vocab_size: int = limits.vocab_size
        self.context: int = limits.max_position_embeddings

    def text(self, text: str) -> list[int]:
        """Ids of a prompt: as it is, or as a user's message with --chat."""
        if not text:
            raise UsageError("the prompt is empty: give at least one character")
        if self.chat is None:
            return self._checked(self.tokenizer.encode(text, self.options.allow_special))
        return self.messages([{"role": "user", "content": text}])

    def messages(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation; --system comes first unless the conversation has its own."""
        if self.chat is None:
            raise UsageError("messages need --chat")
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise UsageError("messages must be a list of objects, not empty")
        if self.options.system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.options.system}, *messages]
        return self._checked(self.chat.render(messages, thinking=self.options.thinking))

    def ids(self, token_ids: list[int]) -> list[int]:
        """Ids as they are."""
        if self.chat is not None:
            raise UsageError("token_ids cannot be used with --chat")
        if not all(type(token_id) is int for token_id in token_ids):
            raise UsageError("token_ids must be integers")
        return self._checked(token_ids)

    def record(self, index: int, record: str | dict[str, Any]) -> Prompt:
        """One input record; what cannot be answered becomes a Prompt with an error."""
        readers: dict[str, tuple[type, Callable[[Any], list[int]]]] = {
            "prompt": (str, self.text),
            "messages": (list, self.messages),
            "token_ids": (list, self.ids),
        }
        if isinstance(record, str):
            record = {"prompt": record}
        found = [key for key in readers if key in record]
        try:
            if len(found) != 1:
                raise UsageError(f"a record needs exactly one of {', '.join(readers)}")
            kind, read = readers[found[0]]
            value = record[found[0]]
            if not isinstance(value, kind):
                raise UsageError(f"{found[0]} must be a {kind.__name__}")
            return Prompt(index, read(value))
        except ValueError as error:
            return Prompt(index, [], str(error))

    def _checked(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise UsageError("the prompt is empty: give at least one token")
        if len(token_ids) >= self.context:
            raise UsageError(
                f"the prompt has {len(token_ids)} tokens; the model's context holds {self.context},"
                " answer included"
            )
        outside = [t for t in token_ids if not 0 <= t < self.vocab_size]
        if outside:
            raise UsageError(
                f"token id {outside[0]} is outside the vocabulary of {self.vocab_size}"
            )
        return token_ids
