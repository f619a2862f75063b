"""Norm and rotation of the drafter's heads, between a layer's first projection and its attention.

    joint = [queries | keys | the rest]             heads of one row of the projection
    queries, keys -> rope(rms_norm(head))           rope in half-split pairs
    the rest      -> as it is                       values

| name      | shape     | dtype, meaning                                    |
|-----------|-----------|---------------------------------------------------|
| joint     | [T, N, d] | bfloat16 or float32                               |
| q_norm    | [d]       | dtype of joint                                    |
| k_norm    | [d]       | dtype of joint                                    |
| eps       | scalar    | float: of both norms                              |
| positions | [T]       | integer, absolute                                 |
| inv_freq  | [d/2]     | float32                                           |
| queries   | scalar    | int: heads that q_norm is for, the first ones     |
| keys      | scalar    | int: heads that k_norm is for, behind the queries |
| amplitude | scalar    | float: factor of cosine and sine                  |
| out       | [T, N, d] | dtype of joint                                    |

Rounding: where the parts round: the normed head, then the rotated one, each once.
Errors: ValueError when shapes do not fit.
Source: composed of `rms_norm` and `rope`; the order is Qwen3's (`modeling_qwen3.py`), of whose
layers the DFlash drafter is made.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost
from ddtree_numba.spec.rms_norm import rms_norm
from ddtree_numba.spec.rope import SCALING, rope, yarn_frequencies

TOLERANCE = dict(rtol=2**-6, atol=2**-7)  # a step of the norm, then of a difference of products


def qk_norm_rope(
    joint: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    eps: float,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    queries: int,
    keys: int,
    amplitude: float = 1.0,
) -> np.ndarray:
    """All heads, the first `queries + keys` of them normed and rotated."""
    if joint.ndim != 3 or not 0 <= queries <= queries + keys <= joint.shape[1]:
        raise ValueError(f"joint {joint.shape} does not have {queries} + {keys} heads")
    out = joint.copy()
    for norm, heads in (
        (q_norm, slice(queries)),
        (k_norm, slice(queries, queries + keys)),
    ):
        normed = rms_norm(joint[:, heads], norm, eps)
        out[:, heads] = rope(normed, positions, inv_freq, interleaved=False, amplitude=amplitude)
    return out


CASES: dict[str, dict] = {
    "one_row": dict(T=1, queries=4, keys=2, N=8, d=32),
    "no_row": dict(T=0, queries=4, keys=2, N=8, d=32),
    "keys_alone": dict(T=5, queries=0, keys=2, N=4, d=32),
    "nothing_turns": dict(T=2, queries=0, keys=0, N=3, d=16),
    "all_turn": dict(T=3, queries=1, keys=2, N=3, d=48),
    "wide_heads": dict(T=2, queries=1, keys=1, N=3, d=256),
    "amplitude": dict(T=3, queries=2, keys=1, N=4, d=16, amplitude=1.4158883083359672),
    "tiny": dict(T=8, queries=4, keys=2, N=8, d=32),
    "k26": dict(T=8, queries=8, keys=1, N=10, d=128),
    "k26_keys": dict(T=8, queries=0, keys=1, N=2, d=128),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    return dict(
        joint=rng.standard_normal((case["T"], case["N"], case["d"])).astype(BF16),
        q_norm=rng.uniform(0.5, 1.5, case["d"]).astype(BF16),
        k_norm=rng.uniform(0.5, 1.5, case["d"]).astype(BF16),
        eps=1e-6,
        positions=1000 + np.arange(case["T"], dtype=np.int32),
        inv_freq=yarn_frequencies(case["d"], 1e6, SCALING),
        queries=case["queries"],
        keys=case["keys"],
        amplitude=case.get("amplitude", 1.0),
    )


def cost(case: dict) -> Cost:
    """Heads read and written, weights once, positions; angles are arithmetic."""
    rows, d, turned = case["T"], case["d"], case["queries"] + case["keys"]
    moved = 4 * rows * case["N"] * d + 4 * d + 4 * rows + 2 * d
    return Cost(bytes=moved, flops=7 * rows * turned * d)
