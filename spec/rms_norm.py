"""Root-mean-square norm, alone or behind the residual sum.

    y = x / sqrt(mean(x^2) + eps) * weight            mean over the last axis
    with a residual:  s = round(x + residual),  y = norm of s,  returns (y, s)

| name     | shape    | dtype, meaning                                         |
|----------|----------|--------------------------------------------------------|
| x        | [..., D] | bfloat16 or float32                                    |
| weight   | [D]      | bfloat16 or float32                                    |
| eps      | scalar   | float: added to the mean square                        |
| residual | [..., D] | bfloat16 or float32; None: no sum, y alone is returned |
| y, s     | [..., D] | dtype of x                                             |

Engines that round before the weight, or norm the unrounded sum, get other numbers.

Rounding: float32 inside; the sum s before it is normed, so that y is a function of the stored
residual; y, once.
Errors: ValueError when the weight or the residual does not fit x.
Source: RMSNorm (arXiv 1910.07467), section 4.
"""

from typing import overload

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost, widen

TOLERANCE = dict(rtol=2**-7, atol=1e-6)  # another order of the sum: a step of bfloat16


@overload
def rms_norm(
    x: np.ndarray, weight: np.ndarray, eps: float, residual: None = None
) -> np.ndarray: ...
@overload
def rms_norm(
    x: np.ndarray, weight: np.ndarray, eps: float, residual: np.ndarray
) -> tuple[np.ndarray, np.ndarray]: ...
def rms_norm(
    x: np.ndarray, weight: np.ndarray, eps: float, residual: np.ndarray | None = None
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """y, or (y, s) with a residual."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {weight.shape} does not fit rows of {x.shape}")
    if residual is None:
        return _norm(x, weight, eps)
    if residual.shape != x.shape:
        raise ValueError(f"residual {residual.shape} does not fit x {x.shape}")
    total = (widen(x) + widen(residual)).astype(x.dtype)
    return _norm(total, weight, eps), total


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    wide = np.ascontiguousarray(widen(x))  # else the sum may run another way
    mean = np.sum(wide * wide, axis=-1, keepdims=True) / np.float32(x.shape[-1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return (wide * scale * widen(weight)).astype(x.dtype)


CASES: dict[str, dict] = {
    "one_row": dict(T=1, D=192),
    "no_row": dict(T=0, D=192),
    "odd_width": dict(T=5, D=33),
    "one_column": dict(T=3, D=1),
    "latent": dict(T=17, D=64),
    "residual": dict(T=17, D=192, residual=True),
    "k26": dict(T=17, D=7168, residual=True),
    "k26_q_a": dict(T=17, D=1536),
    "k26_kv_a": dict(T=17, D=512),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    shape = (case["T"], case["D"])
    x = rng.standard_normal(shape).astype(BF16)
    weight = rng.uniform(0.5, 1.5, case["D"]).astype(BF16)
    residual = rng.standard_normal(shape).astype(BF16) if case.get("residual") else None
    return dict(x=x, weight=weight, eps=1e-5, residual=residual)


def cost(case: dict) -> Cost:
    elements = case["T"] * case["D"]
    arrays = 4 if case.get("residual") else 2
    return Cost(bytes=2 * (arrays * elements + case["D"]), flops=4 * elements)
