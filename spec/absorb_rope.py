"""A query of absorbed MLA: into latent space by its head's matrix, its rotary part turned.

    query = [absorb(q[..., :a], weight) | rope(q[..., a:])]     rope in interleaved pairs

| name      | shape       | dtype, meaning                                                  |
|-----------|-------------|-----------------------------------------------------------------|
| q         | [T, h, a+P] | bfloat16 or float32                                             |
| weight    | [h, a, b]   | bfloat16, or float32 that was widened before; C order for speed |
| positions | [T]         | integer, absolute                                               |
| inv_freq  | [P/2]       | float32                                                         |
| amplitude | scalar      | float: factor of cosine and sine                                |
| query     | [T, h, b+P] | dtype of q                                                      |

Rounding: where the parts round: each number written, once.
Errors: ValueError when shapes do not fit.
Source: composed of `absorb` and `rope`.
"""

import numpy as np

from ddtree_numba.spec.absorb import absorb
from ddtree_numba.spec.numerics import BF16, Cost
from ddtree_numba.spec.rope import SCALING, rope, yarn_frequencies

TOLERANCE = dict(rtol=2**-7, atol=2e-3)  # of `absorb`; the rotation has numpy's bits


def absorb_rope(
    q: np.ndarray,
    weight: np.ndarray,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    amplitude: float = 1.0,
) -> np.ndarray:
    """Rows of every head, as attention takes them."""
    if weight.ndim != 3 or q.shape[-1] != weight.shape[1] + 2 * len(inv_freq):
        raise ValueError(f"weight {weight.shape}, inv_freq {inv_freq.shape} do not fit q {q.shape}")
    nope, turned = np.split(q, [weight.shape[1]], axis=-1)
    parts = absorb(nope, weight), rope(turned, positions, inv_freq, amplitude=amplitude)
    return np.concatenate(parts, axis=-1)


CASES: dict[str, dict] = {
    "one_row": dict(T=1, h=8, a=32, b=64, P=16),
    "no_row": dict(T=0, h=8, a=32, b=64, P=16),
    "tiny": dict(T=17, h=8, a=32, b=64, P=16),
    "one_head": dict(T=5, h=1, a=72, b=40, P=8),
    "amplitude": dict(T=3, h=2, a=8, b=8, P=16, amplitude=1.4158883083359672),
    "odd": dict(T=3, h=3, a=7, b=5, P=2),
    "k26": dict(T=17, h=8, a=128, b=512, P=64),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    rows, heads, ins, outs, turned = (case[k] for k in ("T", "h", "a", "b", "P"))
    weight = rng.standard_normal((heads, ins, outs)) / np.sqrt(ins)
    return dict(
        q=rng.standard_normal((rows, heads, ins + turned)).astype(BF16),
        weight=weight.astype(BF16),
        positions=1000 + np.arange(rows),
        inv_freq=yarn_frequencies(turned, 50000.0, SCALING),
        amplitude=case.get("amplitude", 1.0),
    )


def cost(case: dict) -> Cost:
    rows, heads, ins, outs, turned = (case[k] for k in ("T", "h", "a", "b", "P"))
    moved = 2 * heads * (rows * (ins + outs + 2 * turned) + ins * outs) + 4 * rows + 2 * turned
    return Cost(bytes=moved, flops=rows * heads * (2 * ins * outs + 3 * turned))
