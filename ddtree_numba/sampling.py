"""What a caller may ask of one answer."""

import secrets
from dataclasses import dataclass

from ddtree_numba.spec import next_token


@dataclass(frozen=True)
class SamplingParams(next_token.SamplingParams):
    """The distribution (temperature, top_k, top_p, min_p) and the limits of one answer.

    | field          | meaning                                                                 |
    |----------------|-------------------------------------------------------------------------|
    | max_new_tokens | exact limit of emitted tokens, the end-of-turn token included           |
    | seed           | of the noise, 0 .. 2^64 - 1; None draws one, which the statistics report |
    | stop           | strings that end the answer; the text stops before them                 |
    | ignore_eos     | go on past stop tokens                                                  |
    """

    max_new_tokens: int = 128
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise ValueError, in one line, for a value out of range."""
        super().validate()
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or more, not {self.max_new_tokens}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must lie in 0 .. 2^64 - 1, not {self.seed}")
        if any(not stop for stop in self.stop):
            raise ValueError("a stop string must not be empty")

    def seed_or_fresh(self) -> int:
        """The seed to use: the one asked for, or fresh entropy."""
        return secrets.randbits(32) if self.seed is None else self.seed
