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
    | stop           | strings (or one) that end the answer; the text stops before them         |
    | ignore_eos     | go on past stop tokens                                                  |
    """

    max_new_tokens: int = 128
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """ValueError, in one line, for a value of the wrong type or out of range."""
        super().__post_init__()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be texts that are not empty, not {self.stop!r}")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be an integer >= 0, not {self.max_new_tokens}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**64):
            raise ValueError(f"seed must be an integer in 0 .. 2^64 - 1, not {self.seed}")

    def seed_or_fresh(self) -> int:
        """The seed to use: the one asked for, or fresh entropy."""
        return secrets.randbits(32) if self.seed is None else self.seed
