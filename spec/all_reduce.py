"""Sum over the ranks of a tensor-parallel group, in rank order.

    out = ((partials[0] + partials[1]) + partials[2]) + ..

| name     | shape        | dtype, meaning                                     |
|----------|--------------|----------------------------------------------------|
| partials | [ranks, ...] | bfloat16 or float32: what each rank computed       |
| out      | [...]        | dtype of the partials; the same bits on every rank |

The order holds whatever the payload and the method of transport.

Rounding: sums in float32; out, once.
Errors: ValueError for no ranks.
Source: Megatron-LM (arXiv 1909.08053), section 3: two sums a layer; the fixed order is ours.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost, widen

TOLERANCE = 0  # float32 additions in a given order


def all_reduce(partials: np.ndarray) -> np.ndarray:
    """The sum of the partials, in rank order."""
    if not len(partials):
        raise ValueError("a sum over no ranks")
    total = widen(partials[0]).copy()
    for partial in partials[1:]:
        total += widen(partial)
    return total.astype(partials.dtype, copy=False)


CASES: dict[str, dict] = {
    "one_rank": dict(ranks=1, T=3, H=192),
    "two_ranks": dict(ranks=2, T=1, H=192),
    "no_row": dict(ranks=8, T=0, H=192),
    "odd": dict(ranks=3, T=5, H=7),
    "eight_ranks": dict(ranks=8, T=17, H=192),
    "k26": dict(ranks=8, T=17, H=7168),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    return dict(partials=rng.standard_normal((case["ranks"], case["T"], case["H"])).astype(BF16))


def cost(case: dict) -> Cost:
    elements = case["T"] * case["H"]
    return Cost(bytes=2 * (case["ranks"] + 1) * elements, flops=(case["ranks"] - 1) * elements)
