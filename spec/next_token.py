"""The token that follows each row of logits: argmax, or a draw that is a pure function of the row.

One distribution serves every path (plain decoding, every tree node, the bonus), in this order:

    1. tokens are ranked by (-logit, id): the first is the greedy choice
    2. l = logit / temperature                              rounded once, saturating
    3. top-k: the first k ranks stay                        0 or k >= V: off
    4. top-p: of these, the first ranks until their mass reaches top_p        1: off
    5. min-p: of these, the tokens with exp(l - max l) >= min_p               0: off
    6. of these, the token with the largest l - ln E wins   E: noise of (seed, position, id)

| name      | shape  | dtype, meaning                                               |
|-----------|--------|--------------------------------------------------------------|
| logits    | [M, V] | bfloat16 or float32; -inf entries are excluded tokens        |
| positions | [M]    | int64: absolute position of the token that is drawn          |
| seeds     | [M]    | uint64: the request's seed                                   |
| params    | scalar | SamplingParams: temperature, top_k, top_p and min_p          |
| out       | [M]    | int32; -1: the row holds a NaN, or its maximum is not finite |

The race of step 6 draws from softmax(l) over the tokens that stayed. Equal scores: lower id. A
temperature below 1e-5 means argmax, and no filter can change that.

Rounding: masses are integers (`numerics.mass`), so that sums are exact in any order; the mass of
the first ranks has reached top_p when it is >= ceil(total * (top_p * (1 - 2**-20))), both products
in float64. Everything else is float32, each operation rounded on its own: a kernel that issues the
same operations draws the same.
Errors: ValueError for shapes that do not fit; SamplingParams refuses values out of range.
Source: step 6 is the Gumbel-max trick (Maddison et al., arXiv 1411.0030), noise from Philox
(`noise.py`); top-k: arXiv 1805.04833; top-p: arXiv 1904.09751; min-p: arXiv 2407.01082.
"""

import math
from dataclasses import dataclass

import numpy as np

from ddtree_numba.spec.noise import exponential, random_words
from ddtree_numba.spec.numerics import F32, Cost, exp32, largest, log32, mass, widen

TOLERANCE = 0
GREEDY_BELOW = 1e-5  # temperatures that mean argmax
TOP_P_SLACK = 2.0**-20  # masses carry float32 errors: .6 + .3 has to reach a top_p of .9
LARGEST = np.finfo(F32).max


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """ValueError, one line, for the first value that means nothing; top_k above V means off."""
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(value := getattr(self, name), int | float | np.number):
                raise ValueError(f"{name} must be a number, not {value!r}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be a finite number >= 0, not {self.temperature}")
        if not isinstance(self.top_k, int | np.integer) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer >= 0 (0 = off), not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie between 0 and 1, not {self.min_p}")


def next_token(
    logits: np.ndarray, positions: np.ndarray, seeds: np.ndarray, params: SamplingParams
) -> np.ndarray:
    """The next token of each row."""
    logits = widen(logits)
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [rows, vocabulary], not {logits.shape}")
    positions, seeds = np.asarray(positions), np.asarray(seeds)
    for name, value in (("positions", positions), ("seeds", seeds)):
        if value.shape != logits.shape[:1]:
            raise ValueError(f"{name} must have {len(logits)} entries, not shape {value.shape}")
    usable = np.isfinite(logits.max(axis=1))  # the maximum of a row with a NaN is NaN
    scores = logits
    if params.temperature >= GREEDY_BELOW:
        scores = logits.copy()
        scores[usable] = _race(logits[usable], positions[usable], seeds[usable], params)
    return np.where(usable, scores.argmax(axis=1), -1).astype(np.int32)


def _race(
    logits: np.ndarray, positions: np.ndarray, seeds: np.ndarray, params: SamplingParams
) -> np.ndarray:
    """float32[M, V] scores of step 6; -inf where a token is excluded."""
    scaled = scale(logits, params.temperature)
    words = random_words(seeds, positions, logits.shape[1])
    scores = scaled - log32(exponential(words))
    scores[~kept(logits, scaled, params)] = -np.inf
    return scores


def scale(logits: np.ndarray, temperature: float) -> np.ndarray:
    """logits / temperature; a finite logit stays finite, lest it pass for an excluded one."""
    with np.errstate(over="ignore"):
        scaled = logits / np.float32(min(temperature, float(LARGEST)))
    return np.where(np.isneginf(logits), logits, np.clip(scaled, -LARGEST, LARGEST))


def kept(logits: np.ndarray, scaled: np.ndarray, params: SamplingParams) -> np.ndarray:
    """bool[M, V]: the tokens that top-k, top-p and min-p leave, in rows with a finite maximum."""
    vocabulary = logits.shape[1]
    keep = ~np.isneginf(logits)
    with np.errstate(over="ignore"):
        below = scaled - scaled.max(axis=1, keepdims=True)
    if 0 < params.top_k < vocabulary or params.top_p < 1:
        order = largest(logits, min(params.top_k or vocabulary, vocabulary))
        stay = np.ones(order.shape, bool)
        if params.top_p < 1:
            masses = mass(np.take_along_axis(below, order, axis=1))
            share = np.float64(params.top_p * (1 - TOP_P_SLACK))
            needed = np.ceil(masses.sum(axis=1, keepdims=True) * share)
            stay = np.cumsum(masses, axis=1) - masses < needed.astype(np.int64)
        chosen = np.zeros(logits.shape, bool)
        np.put_along_axis(chosen, order, stay, axis=1)
        keep &= chosen
    if params.min_p > 0:
        keep &= exp32(below) >= np.float32(params.min_p)
    return keep


CASES: dict[str, dict] = {
    "greedy": dict(rows=3, vocabulary=10),
    "one_token": dict(rows=2, vocabulary=1, temperature=1.0),
    "partial_block": dict(rows=5, vocabulary=37, temperature=0.8),
    "top_k": dict(rows=4, vocabulary=64, temperature=1.0, top_k=5),
    "top_p": dict(rows=4, vocabulary=64, temperature=1.0, top_p=0.9),
    "min_p": dict(rows=4, vocabulary=64, temperature=1.0, min_p=0.1),
    "all_filters": dict(rows=9, vocabulary=999, temperature=0.7, top_k=50, top_p=0.95, min_p=0.02),
    "tiny": dict(rows=17, vocabulary=2048, temperature=0.8, top_p=0.95),
    "k26": dict(rows=17, vocabulary=163840, temperature=0.8, top_p=0.95),
    "k26_greedy": dict(rows=17, vocabulary=163840),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Rows with ties and excluded tokens; a row of two or more also gets an unusable last row."""
    settings = {name: value for name, value in case.items() if name not in ("rows", "vocabulary")}
    rows, vocabulary = case["rows"], case["vocabulary"]
    logits = (rng.standard_normal((rows, vocabulary)) * 3).astype(F32).round(1)
    logits[:, 1::7] = -np.inf
    if rows > 1:
        logits[-1, -1] = np.nan
    return dict(
        logits=logits,
        positions=rng.integers(0, 2**40, rows),
        seeds=rng.integers(0, 2**64, rows, dtype=np.uint64),
        params=SamplingParams(**settings),
    )


def cost(case: dict) -> Cost:
    """Logits read once; about 150 operations a token when a race is drawn."""
    tokens = case["rows"] * case["vocabulary"]
    each = 150 if case.get("temperature") else 1
    return Cost(bytes=4 * tokens + 20 * case["rows"], flops=each * tokens)
