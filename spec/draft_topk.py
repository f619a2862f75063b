"""The k likeliest tokens of each draft position, with log-probabilities over the full vocabulary.

    log_prob[v] = (logit[v] - m) - ln(sum over u of exp(logit[u] - m)),   m = the row's maximum

| name      | shape             | dtype, meaning                                                  |
|-----------|-------------------|-----------------------------------------------------------------|
| logits    | [R, L, V]         | bfloat16 or float32                                             |
| k         | scalar            | int >= 0; above V it means V                                    |
| token_ids | [R, L, min(k, V)] | int32, by descending logit; equal: lower id first; NaN last     |
| log_probs | same              | float32; -inf stays -inf; a NaN logit has no mass and gives NaN |

A row whose maximum is not finite has no distribution: all its log_probs are NaN, which `tree_build`
takes for "no proposal here".

Rounding: the sum is one of integers, in units of 2**-40 (`numerics.mass`), so it has the same bits
in any order and in any company; it is rounded to float32 once. Every other operation rounds to
float32 on its own.
Errors: ValueError for a negative k and for logits that are not [R, L, V].
Source: DDTree (arXiv 2604.12989; liranringel/ddtree, `ddtree.py`, `build_ddtree_tree`); the order
of ties and the integer sum are ours.
"""

import numpy as np

from ddtree_numba.spec.numerics import F32, MASS_BITS, Cost, largest, log32, mass, widen

TOLERANCE = 0


def draft_topk(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(token_ids, log_probs) of the k likeliest tokens of each row."""
    logits = widen(logits)
    if logits.ndim != 3 or logits.shape[2] == 0:
        raise ValueError(f"logits must be [requests, depths, vocabulary], not {logits.shape}")
    if k < 0:
        raise ValueError(f"k must not be negative: {k}")
    token_ids = largest(logits, min(k, logits.shape[2]))
    best = np.take_along_axis(logits, token_ids, axis=2)
    # fmax passes over NaN: one bad logit does not spoil its row
    top = np.fmax.reduce(logits, axis=2, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite maximum makes NaN, as promised
        total = mass(logits - top).sum(axis=2, keepdims=True)
        log_sum = log32(np.maximum(total, 1).astype(F32) * np.float32(2.0**-MASS_BITS))
        log_probs = (best - top) - log_sum
    log_probs = np.where(np.isfinite(top), log_probs, np.float32(np.nan))
    return token_ids.astype(np.int32), log_probs


CASES: dict[str, dict] = {
    "one_of_one": dict(requests=1, depths=1, vocabulary=1, k=1),
    "no_depth": dict(requests=2, depths=0, vocabulary=8, k=4),
    "k_is_zero": dict(requests=1, depths=2, vocabulary=8, k=0),
    "k_is_the_vocabulary": dict(requests=1, depths=2, vocabulary=16, k=16),
    "k_above_the_vocabulary": dict(requests=1, depths=2, vocabulary=16, k=17),
    "ties": dict(requests=2, depths=3, vocabulary=40, k=7, ties=True),
    "tiny": dict(requests=2, depths=7, vocabulary=2048, k=32, ties=True),
    "k26": dict(requests=1, depths=7, vocabulary=163840, k=32, ties=True),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Logits; with `ties`, a few distinct values, one NaN and one -inf a row."""
    shape = (case["requests"], case["depths"], case["vocabulary"])
    logits = (rng.standard_normal(shape) * 4).astype(F32)
    if case.get("ties"):
        logits = np.round(logits * 2) / np.float32(2)
        logits[:, :, 3], logits[:, :, 5] = np.nan, -np.inf
    return dict(logits=logits, k=case["k"])


def cost(case: dict) -> Cost:
    """Logits read once; about 20 operations a logit for exp and the sum."""
    rows, vocabulary = case["requests"] * case["depths"], case["vocabulary"]
    moved = rows * (4 * vocabulary + 8 * case["k"])
    return Cost(bytes=moved, flops=20 * rows * vocabulary)
