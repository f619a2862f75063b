"""What every rank of a tensor-parallel group has, in rank order.

    stacked:  out[r] = parts[r]
    joined:   out[.., r n + i] = parts[r, .., i]      such as logits of a vocabulary in shards

| name   | shape                              | dtype, meaning                          |
|--------|------------------------------------|-----------------------------------------|
| parts  | [ranks, ..., n]                    | any: what each rank has                 |
| joined | flag                               | along the last axis, and not a new one  |
| out    | [ranks, ..., n], or [..., ranks n] | dtype of the parts; equal on every rank |

Rounding: none.
Errors: ValueError for no ranks, and for single numbers to be joined.
Source: Megatron-LM (arXiv 1909.08053), section 3: the gather of the logits.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, F32, Cost

TOLERANCE = 0  # data movement


def all_gather(parts: np.ndarray, joined: bool = False) -> np.ndarray:
    """The parts of all ranks, stacked or joined."""
    if not len(parts):
        raise ValueError("a gather from no ranks")
    if not joined:
        return parts.copy()
    if parts.ndim == 1:
        raise ValueError("single numbers have no axis to be joined along")
    return np.concatenate(list(parts), axis=-1)


CASES: dict[str, dict] = {
    "one_rank": dict(ranks=1, T=3, n=8, dtype=F32, joined=True),
    "two_ranks": dict(ranks=2, T=3, n=24, dtype=BF16, joined=False),
    "three_ranks": dict(ranks=3, T=5, n=40, dtype=F32, joined=True),
    "no_row": dict(ranks=8, T=0, n=16, dtype=F32, joined=True),
    "keys": dict(ranks=8, T=17, n=1, dtype=np.dtype(np.int64), joined=False),
    "k26": dict(ranks=8, T=17, n=20_480, dtype=F32, joined=True),
    "k26_keys": dict(ranks=8, T=17, n=1, dtype=np.dtype(np.int64), joined=False),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Bits of every kind, NaN among them."""
    shape, dtype = (case["ranks"], case["T"], case["n"]), case["dtype"]
    words = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return dict(parts=words.view(dtype)[..., 0], joined=case["joined"])


def cost(case: dict) -> Cost:
    """A rank's own part is read, all are written."""
    part = case["T"] * case["n"] * case["dtype"].itemsize
    return Cost(bytes=(case["ranks"] + 1) * part, flops=0)
