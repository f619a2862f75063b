"""One answer as it grows, and its two reports: a JSON record and a line for people."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ddtree_numba.reasoning import ReasoningParser
from ddtree_numba.request import Increment, Stats

STATISTICS = (
    *("prompt_tokens", "completion_tokens", "rounds", "tokens_per_round", "tokens_per_second"),
    *("mode", "budget", "backend", "seed"),
)
TIMES = ("prefill_seconds", "decode_seconds", "setup_seconds")


@dataclass
class Answer:
    """The increments of one prompt so far; `reasoning` stays empty without a `parser`."""

    parser: ReasoningParser | None = None
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    stats: Stats | None = None

    def add(self, increment: Increment) -> tuple[str, str]:
        """Take up an increment -> what it adds to (reasoning, answer text)."""
        self.token_ids += increment.token_ids
        self.finish_reason = increment.finish_reason or self.finish_reason
        self.error = increment.error or self.error
        self.stats = increment.stats or self.stats
        parts = ("", increment.text)
        if self.parser is not None:
            parts = self.parser.push(increment.text, final=increment.finish_reason is not None)
        self.reasoning += parts[0]
        self.text += parts[1]
        return parts

    def record(self) -> dict[str, Any]:
        """The fields of --json."""
        record: dict[str, Any] = {"text": self.text}
        if self.parser is not None:
            record["reasoning"] = self.reasoning
        record |= {"token_ids": self.token_ids, "finish_reason": self.finish_reason}
        record |= self._statistics(STATISTICS)
        return record | ({"error": self.error} if self.error else {})

    def output_record(self, index: int) -> dict[str, Any]:
        """A line of --output."""
        return {"index": index, **self.record(), **self._statistics(TIMES)}

    def _statistics(self, names: tuple[str, ...]) -> dict[str, Any]:
        """By name; null in an answer that ended before it began."""
        known = {"completion_tokens": len(self.token_ids)}
        if self.stats is not None:
            known = asdict(self.stats)
        return {name: known.get(name) for name in names}

    def fills(self, context: int) -> bool:
        """Did the answer end because prompt and answer are as long as the model's context?"""
        if self.finish_reason != "length" or self.stats is None:
            return False
        return self.stats.prompt_tokens + self.stats.completion_tokens == context

    def summary(self, greedy: bool, context: int) -> str:
        """The closing line on standard error."""
        if self.stats is None:
            return f"{self.finish_reason}: no statistics"
        s = self.stats
        rate = "-" if s.tokens_per_second is None else f"{s.tokens_per_second:.1f}"
        full = f" (the context of {context} tokens is full)" if self.fills(context) else ""
        parts = [
            f"{self.finish_reason}{full}: {counted(s.completion_tokens, 'token')}"
            f" in {counted(s.rounds, 'round')}, {per_round(s.completion_tokens, s.rounds)}",
            f"{rate} tokens/s",
            f"load {s.load_seconds:.2f} s, prefill {s.prefill_seconds:.2f} s"
            f" ({counted(s.prompt_tokens, 'token')}), decode {s.decode_seconds:.2f} s"
            + (f", graphs {s.setup_seconds:.2f} s" if s.setup_seconds else ""),
            s.mode + (f" budget {s.budget}" if s.mode == "ddtree" else ""),
            s.backend,
        ]
        return "; ".join(parts + ([] if greedy else [f"seed {s.seed}"]))


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def per_round(tokens: int, rounds: int) -> str:
    """Tokens per round with its definition; "-" where nothing was decoded."""
    rate = f"{tokens / rounds:.2f}" if rounds else "-"
    return f"{rate} tokens per round (emitted, bonus token included)"
