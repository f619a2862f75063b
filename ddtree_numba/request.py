"""One prompt on its way to an answer, and what the engine reports of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ddtree_numba.detokenize import Detokenizer
from ddtree_numba.sampling import SamplingParams


@dataclass(frozen=True)
class Stats:
    """Counts and times of one finished answer.

    `tokens_per_round` counts every emitted token, bonus tokens included: the last prompt token is
    the first root, so all tokens come from rounds: completion_tokens = tokens_per_round * rounds.
    `tokens_per_second` is of the rounds in decode_seconds; None below two tokens. Rounds in which a
    CUDA graph was made ready count as setup_seconds, and their tokens in no rate.
    """

    prompt_tokens: int
    completion_tokens: int
    rounds: int
    tokens_per_round: float | None
    tokens_per_second: float | None
    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    setup_seconds: float
    mode: str
    budget: int | str | None
    backend: str
    seed: int


@dataclass(frozen=True)
class RoundTrace:
    """The tree of one round, `size` nodes, and the path taken (node indices from the root)."""

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    size: int
    accepted: list[int]
    next_token: int
    emitted: int


@dataclass(frozen=True)
class Increment:
    """What one round adds to the answer of prompt `index`; the last one carries a finish reason.

    `text` may lag behind `token_ids` while a character or a possible stop string is incomplete.
    `finish_reason` is "stop", "length", "cancelled" or "error"; `error` then says why, in one line.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    stats: Stats | None = None
    round: RoundTrace | None = None


def refusal(ids: Sequence[int], context: int, vocab_size: int) -> str | None:
    """Why these prompt ids cannot be answered, in one line; None if they can."""
    if not ids:
        return "the prompt is empty: give at least one token"
    if len(ids) >= context:
        return (
            f"the prompt has {len(ids)} tokens; "
            f"the context holds {context}, of which the answer needs at least one"
        )
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        return f"token id {outside} lies outside the vocabulary of {vocab_size}"
    return None


@dataclass(eq=False)
class Request:
    """A prompt being answered: `length` positions are committed, `root` is the token after them."""

    index: int
    prompt: list[int]
    params: SamplingParams
    detokenizer: Detokenizer
    seed: int
    mode: str
    budget: int | str | None
    slot: int = -1
    length: int = 0
    emitted: int = 0
    rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    timed_tokens: int = 0  # emitted in decode_seconds
    setup_seconds: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    root: int = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.prompt[-1]

    def room(self, context: int) -> int:
        """Deepest node worth verifying: its path and the token after it still fit both limits."""
        return min(context - 1 - self.length, self.params.max_new_tokens - self.emitted) - 1

    def take(self, tokens: list[int], stop_ids: frozenset[int], context: int) -> tuple[int, str]:
        """Emit tokens until one of them ends the answer -> (how many were emitted, their text).

        One at a time, so that whichever end comes first in token order is the one that counts.
        """
        text = ""
        for count, token in enumerate(tokens, 1):
            if token < 0:
                self.finish_reason = "error"
                position = len(self.prompt) + self.emitted
                self.error = (
                    f"non-finite logits for position {position}: round {self.rounds}, "
                    f"depth {count - 1} of the accepted path"
                )
                return count - 1, text
            self.emitted += 1
            self.root = token
            if token in stop_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
            else:
                text += self.detokenizer.push(token)
                full = len(self.prompt) + self.emitted == context
                if self.detokenizer.stopped:
                    self.finish_reason = "stop"
                elif full or self.emitted == self.params.max_new_tokens:
                    self.finish_reason = "length"
            if self.finish_reason:
                return count, text
        return len(tokens), text

    def spend(self, seconds: float, tokens: int, timed: bool) -> None:
        """A round took so long, and emitted so many tokens."""
        if timed:
            self.decode_seconds += seconds
            self.timed_tokens += tokens
        else:
            self.setup_seconds += seconds

    def increment(
        self,
        tokens: list[int],
        text: str,
        backend: str,
        load_seconds: float,
        trace: RoundTrace | None = None,
    ) -> Increment:
        """What to report now: held-back text and the statistics too, once the answer has ended."""
        if self.finish_reason is None:
            return Increment(self.index, tokens, text, round=trace)
        text += self.detokenizer.flush()
        stats = self.stats(backend, load_seconds)
        return Increment(self.index, tokens, text, self.finish_reason, self.error, stats, trace)

    def stats(self, backend: str, load_seconds: float) -> Stats:
        """Counts and times so far."""
        timed = self.timed_tokens > 1 and self.decode_seconds > 0
        return Stats(
            prompt_tokens=len(self.prompt),
            completion_tokens=self.emitted,
            rounds=self.rounds,
            tokens_per_round=self.emitted / self.rounds if self.rounds else None,
            tokens_per_second=self.timed_tokens / self.decode_seconds if timed else None,
            load_seconds=load_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            setup_seconds=self.setup_seconds,
            mode=self.mode,
            budget=self.budget,
            backend=backend,
            seed=self.seed,
        )
