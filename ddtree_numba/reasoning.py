"""Tells the reasoning of an answer from the answer proper, while both are streamed.

The template usually opens the block itself; the output then starts inside it and holds `</think>`
alone. So what the prompt ends with decides where the output starts.
"""

from collections.abc import Sequence
from typing import Self

from ddtree_numba.detokenize import open_stop
from ddtree_numba.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
TOOLS = "<|tool_calls_section_begin|>"  # also ends the reasoning, and belongs to the answer


class ReasoningParser:
    """One answer, as chunks of text of any size."""

    def __init__(self, inside: bool | None) -> None:
        """Start inside a reasoning block, after it, or (None) wherever the text itself shows."""
        self.inside = inside
        self._held = ""

    @classmethod
    def after_prompt(cls, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Self:
        """Inside after a prompt that ends in <think>, outside after </think>, else undecided."""
        last = tokenizer.name_of(prompt_ids[-1]) if prompt_ids else None
        return cls({OPEN: True, CLOSE: False}.get(last or ""))

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """-> (reasoning, answer) that this chunk makes sure; what may become a tag is held back."""
        self._held += text
        if self.inside is None and not self._decide(final):
            return "", ""
        if not self.inside:
            answer, self._held = self._held, ""
            return "", answer
        close, tools = self._held.find(CLOSE), self._held.find(TOOLS)
        if close >= 0 and (tools < 0 or close < tools):
            reasoning, answer = self._held[:close], self._held[close + len(CLOSE) :]
        elif tools >= 0:
            reasoning, answer = self._held[:tools], self._held[tools:]
        else:
            keep = 0 if final else open_stop(self._held, (CLOSE, TOOLS))
            cut = len(self._held) - keep
            reasoning, self._held = self._held[:cut], self._held[cut:]
            return reasoning, ""
        self.inside, self._held = False, ""
        return reasoning, answer

    def flush(self) -> tuple[str, str]:
        """The rest, once no text follows."""
        return self.push("", final=True)

    def _decide(self, final: bool) -> bool:
        if self._held.startswith(OPEN):
            self.inside, self._held = True, self._held.removeprefix(OPEN)
        elif final or not OPEN.startswith(self._held):
            self.inside = False
        return self.inside is not None
