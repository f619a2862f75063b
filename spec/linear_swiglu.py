"""The first half of a gated feed-forward layer: gate and up in one projection, then SwiGLU.

    out = swiglu(linear(x, weight))      weight = [gate rows | up rows]

| name   | shape    | dtype, meaning                                         |
|--------|----------|--------------------------------------------------------|
| x      | [T, K]   | bfloat16 or float32                                    |
| weight | [2 I, K] | bfloat16, or float32 that was widened before           |
| out    | [T, I]   | dtype of x                                             |

Rounding: where the two round, so that nothing tells a fused kernel from them: the projection once
to the dtype of x; out, once.
Errors: ValueError when K differs, or when the weight's rows are odd.
Source: composed of `linear` and `swiglu`.
"""

import numpy as np

from ddtree_numba.spec.linear import linear
from ddtree_numba.spec.numerics import BF16, Cost
from ddtree_numba.spec.swiglu import swiglu

TOLERANCE = dict(rtol=2**-6, atol=1e-2)  # a step of bfloat16 in gate and up, times the other


def linear_swiglu(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """silu(x gate^T) * (x up^T)."""
    return swiglu(linear(x, weight))


CASES: dict[str, dict] = {
    "one_row": dict(T=1, I=96, K=256),
    "no_row": dict(T=0, I=96, K=256),
    "seventeen_rows": dict(T=17, I=32, K=192),
    "long_rows": dict(T=3, I=8, K=4096),
    "odd": dict(T=3, I=7, K=33),
    "k26": dict(T=17, I=2304, K=7168),
    "k26_shared": dict(T=17, I=256, K=7168),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    x = rng.standard_normal((case["T"], case["K"])).astype(BF16)
    weight = rng.standard_normal((2 * case["I"], case["K"])) / np.sqrt(case["K"])
    return dict(x=x, weight=weight.astype(BF16))


def cost(case: dict) -> Cost:
    rows, half, ins = case["T"], case["I"], case["K"]
    moved = 2 * (rows * ins + 2 * half * ins + rows * half)
    return Cost(bytes=moved, flops=4 * rows * half * ins + 5 * rows * half)
