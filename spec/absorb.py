"""The two head-wise products of absorbed MLA.

    out[t, h, b] = sum over a of x[t, h, a] * weight[h, a, b]
    queries:  q_nope[T, h, nope] with W_UK[h, nope, latent]  -> the query in latent space
    outputs:  o_latent[T, h, latent] with W_UV[h, latent, v] -> the value of each head

| name   | shape     | dtype, meaning                                                  |
|--------|-----------|-----------------------------------------------------------------|
| x      | [T, h, a] | bfloat16 or float32                                             |
| weight | [h, a, b] | bfloat16, or float32 that was widened before; C order for speed |
| out    | [T, h, b] | dtype of x                                                      |

A row and a head are one vector-matrix product.

Rounding: products and sums in float32; out, once.
Errors: ValueError when heads or a differ.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2: the up-projections of keys and values move to
the side of queries and outputs.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost, widen

TOLERANCE = dict(rtol=2**-7, atol=2e-3)  # another order of the sum


def absorb(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Rows of every head through that head's matrix."""
    if weight.ndim != 3 or x.shape[-2:] != weight.shape[:2]:
        raise ValueError(f"weight {weight.shape} does not fit rows of {x.shape}")
    return np.matmul(widen(x)[..., None, :], widen(weight))[..., 0, :].astype(x.dtype, copy=False)


CASES: dict[str, dict] = {
    "one_row": dict(T=1, h=8, a=32, b=64),
    "no_row": dict(T=0, h=8, a=32, b=64),
    "one_head": dict(T=5, h=1, a=32, b=64),
    "odd": dict(T=3, h=3, a=7, b=5),
    "tiny_queries": dict(T=17, h=8, a=32, b=64),
    "tiny_outputs": dict(T=17, h=8, a=64, b=32),
    "k26": dict(T=17, h=8, a=128, b=512),
    "k26_outputs": dict(T=17, h=8, a=512, b=128),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    x = rng.standard_normal((case["T"], case["h"], case["a"])).astype(BF16)
    weight = rng.standard_normal((case["h"], case["a"], case["b"])) / np.sqrt(case["a"])
    return dict(x=x, weight=weight.astype(BF16))


def cost(case: dict) -> Cost:
    rows, heads, ins, outs = case["T"], case["h"], case["a"], case["b"]
    moved = 2 * heads * (rows * ins + ins * outs + rows * outs)
    return Cost(bytes=moved, flops=2 * rows * heads * ins * outs)
