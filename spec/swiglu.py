"""Gated activation of a feed-forward layer.

    out = silu(gate) * up      silu(x) = x / (1 + exp(-x))      gate_up = [gate | up]

| name    | shape      | dtype, meaning      |
|---------|------------|---------------------|
| gate_up | [..., 2 I] | bfloat16 or float32 |
| out     | [..., I]   | dtype of gate_up    |

Rounding: float32 inside; out, once.
Errors: ValueError when the last axis is odd.
Source: SwiGLU (arXiv 2002.05202), section 2, with beta = 1 and no bias.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost, widen

TOLERANCE = dict(rtol=2**-7, atol=1e-6)  # another exp: a step of bfloat16


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """silu of the first half times the second."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up {gate_up.shape} does not split into two halves")
    half = gate_up.shape[-1] // 2
    gate = widen(gate_up[..., :half])
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
        activated = gate / (np.float32(1) + np.exp(-gate))
    return (activated * widen(gate_up[..., half:])).astype(gate_up.dtype, copy=False)


CASES: dict[str, dict] = {
    "one_row": dict(T=1, I=256),
    "no_row": dict(T=0, I=256),
    "odd": dict(T=3, I=7),
    "large_values": dict(T=5, I=64, amplitude=200.0),
    "k26": dict(T=17, I=2304),
    "k26_shared": dict(T=17, I=256),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    gate_up = rng.standard_normal((case["T"], 2 * case["I"])) * case.get("amplitude", 1.0)
    return dict(gate_up=gate_up.astype(BF16))


def cost(case: dict) -> Cost:
    elements = case["T"] * case["I"]
    return Cost(bytes=2 * 3 * elements, flops=5 * elements)
