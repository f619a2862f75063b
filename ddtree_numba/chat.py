"""Messages -> prompt ids, by the checkpoint's own chat_template.jinja.

Only markers that the template itself writes become control tokens: before rendering, each "<" and
"[" of the messages gets a guard behind it, a character found nowhere else, so that no name of a
control token is left in them; guards are dropped after the rendered text was cut at such names.
"""

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn, Self

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.tokenizer import Tokenizer
from ddtree_numba.tool_types import sorted_keys, typescript

TEMPLATE = "chat_template.jinja"
GUARDS = (*map(chr, range(0xE000, 0xF900)), *map(chr, range(0xF0000, 0xFFFFE)))  # private use


class Chat:
    """The chat format of one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.openers = sorted({name[0] for name in tokenizer.specials})  # "<" and "["

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer) -> Self:
        """Read chat_template.jinja; CheckpointError without one."""
        path = Path(folder) / TEMPLATE
        try:
            return cls(tokenizer, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{path}: no chat template to use: {reason}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        thinking: bool = False,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of the conversation, ready to be continued by the assistant.

        `thinking` reaches the template as a boolean: whether the turn opens a `<think>` block.
        Raises CheckpointError where the template fails or refuses the messages.
        """
        guard = self._unused(json.dumps([messages, tools], ensure_ascii=False))
        values: dict[str, Any] = {}
        if tools and "tools_ts_str" in self.template:  # as the code published with K2.5 and K2.6
            tools = sorted_keys(tools)
            written = typescript(tools)
            if written is not None:
                values["tools_ts_str"] = self._guarded(written, guard)
        text = self._rendered(
            guard,
            messages=self._guarded(messages, guard),
            tools=self._guarded(tools, guard),
            thinking=thinking,
            preserve_thinking=False,
            add_generation_prompt=add_generation_prompt,
            **values,
        )
        ids: list[int] = []
        for piece in self.tokenizer.split_specials(text):
            if piece in self.tokenizer.specials:
                ids.append(self.tokenizer.specials[piece])
            else:
                ids += self.tokenizer.encode(piece.replace(guard, ""))
        if not ids:
            raise CheckpointError(f"{TEMPLATE}: renders nothing")
        return ids

    def _rendered(self, guard: str, **values: Any) -> str:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)

        def to_json(
            value: Any,
            indent: int | None = None,
            separators: tuple[str, str] | None = None,
            ensure_ascii: bool = False,
            sort_keys: bool = False,
        ) -> str:
            # Guards are put in after escaping, which would make them unrecognizable.
            text = json.dumps(
                _mapped(value, lambda part: part.replace(guard, "")),
                indent=indent,
                separators=separators,
                ensure_ascii=ensure_ascii,
                sort_keys=sort_keys,
            )
            return self._guarded(text, guard)

        environment.filters["tojson"] = to_json
        try:
            return environment.from_string(self.template).render(**values)
        except RecursionError:
            raise CheckpointError(f"{TEMPLATE}: recursion too deep") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            reason = " ".join(str(error).replace(guard, "").split())
            raise CheckpointError(f"{TEMPLATE}: {reason or type(error).__name__}") from None

    def _guarded(self, value: Any, guard: str) -> Any:
        def guarded(text: str) -> str:
            for opener in self.openers:
                text = text.replace(opener, opener + guard)
            return text

        return _mapped(value, guarded)

    def _unused(self, text: str) -> str:
        taken = set(text) | set(self.template)
        return next(guard for guard in GUARDS if guard not in taken)


def _mapped(value: Any, change: Any) -> Any:
    """The same JSON value with every string in it, keys too, replaced by change(string)."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    return value


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
