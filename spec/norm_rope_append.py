"""What stands between MLA's first projection and its second: two norms, the shared key's rotation.

    joint = [q_a | latent | k_rope]                       a row of the projection to the latents
    q = rms_norm(q_a, q_norm)
    scratch = [rms_norm(latent, kv_norm) | rope(k_rope)]  rope in interleaved pairs

| name      | shape        | dtype, meaning                           |
|-----------|--------------|------------------------------------------|
| joint     | [T, Q+D+P]   | bfloat16 or float32                      |
| q_norm    | [Q]          | bfloat16 or float32                      |
| kv_norm   | [D]          | bfloat16 or float32                      |
| eps       | scalar       | float: of both norms                     |
| positions | [T]          | integer, absolute                        |
| inv_freq  | [P/2]        | float32                                  |
| scratch   | [T, D+P]     | dtype of joint, written in place         |
| amplitude | scalar       | float: factor of cosine and sine         |
| shards    | scalar       | int W: joint is [q_a | latent, k_rope]   |
|           |              | of rank 0, of rank 1 ..: a W-th of each  |
| q         | [T, Q]       | dtype of joint                           |

Rounding: where the parts round: each number written, once.
Errors: ValueError when shapes or dtypes do not fit.
Source: composed of `rms_norm`, `rope` and `kv_append`.
"""

import numpy as np

from ddtree_numba.spec.kv_append import kv_append
from ddtree_numba.spec.numerics import BF16, Cost
from ddtree_numba.spec.rms_norm import rms_norm
from ddtree_numba.spec.rope import SCALING, rope, yarn_frequencies

TOLERANCE = dict(rtol=2**-7, atol=1e-6)  # of the norms; the rotation has numpy's bits


def norm_rope_append(
    joint: np.ndarray,
    q_norm: np.ndarray,
    kv_norm: np.ndarray,
    eps: float,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    scratch: np.ndarray,
    amplitude: float = 1.0,
    shards: int = 1,
) -> np.ndarray:
    """q; fills the scratch rows."""
    joint = sorted_parts(joint, len(q_norm), shards)
    first, second = len(q_norm), len(q_norm) + len(kv_norm)
    if joint.shape[-1] != second + 2 * len(inv_freq):
        widths = first, len(kv_norm), 2 * len(inv_freq)
        raise ValueError(f"rows of joint {joint.shape} are not of {widths}")
    q_a, latent, k_rope = np.split(joint, [first, second], axis=-1)
    normed = rms_norm(latent, kv_norm, eps)
    turned = rope(k_rope, positions, inv_freq, amplitude=amplitude)
    kv_append(normed[None], turned[None], scratch[None])
    return rms_norm(q_a, q_norm, eps)


def sorted_parts(joint: np.ndarray, q_width: int, shards: int) -> np.ndarray:
    """All ranks' parts of q_a, then their parts of the rest."""
    rows, width = joint.shape
    if width % shards or q_width % shards:
        raise ValueError(f"rows of joint {joint.shape}, q_a {q_width}: not cut in {shards}")
    parts = joint.reshape(rows, shards, width // shards)
    q_a, rest = np.split(parts, [q_width // shards], axis=-1)
    q_a, rest = q_a.reshape(rows, q_width), rest.reshape(rows, width - q_width)
    return np.concatenate([q_a, rest], axis=-1)


CASES: dict[str, dict] = {
    "one_row": dict(T=1, Q=96, D=64, P=16),
    "no_row": dict(T=0, Q=96, D=64, P=16),
    "tiny": dict(T=17, Q=96, D=64, P=16),
    "amplitude": dict(T=3, Q=8, D=16, P=8, amplitude=1.4158883083359672),
    "odd": dict(T=3, Q=7, D=5, P=2),
    "two_parts": dict(T=3, Q=96, D=64, P=16, shards=2),
    "eight_parts": dict(T=2, Q=128, D=112, P=16, shards=8),
    "k26": dict(T=17, Q=1536, D=512, P=64),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    rows, widths = case["T"], (case["Q"], case["D"], case["P"])
    return dict(
        joint=rng.standard_normal((rows, sum(widths))).astype(BF16),
        q_norm=rng.uniform(0.5, 1.5, case["Q"]).astype(BF16),
        kv_norm=rng.uniform(0.5, 1.5, case["D"]).astype(BF16),
        eps=1e-5,
        positions=1000 + np.arange(rows),
        inv_freq=yarn_frequencies(case["P"], 50000.0, SCALING),
        scratch=np.full((rows, case["D"] + case["P"]), np.nan, BF16),
        amplitude=case.get("amplitude", 1.0),
        shards=case.get("shards", 1),
    )


def cost(case: dict) -> Cost:
    rows, normed, turned = case["T"], case["Q"] + case["D"], case["P"]
    moved = 4 * rows * (normed + turned) + 2 * normed + 4 * rows + 2 * turned
    return Cost(bytes=moved, flops=rows * (4 * normed + 3 * turned))
