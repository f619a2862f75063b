"""Write every node's key row to the scratch area.

    scratch[r, i] = [latent[r, i] | k_rope[r, i]]

| name    | shape       | dtype, meaning                                     |
|---------|-------------|----------------------------------------------------|
| latent  | [R, N, D]   | dtype of the cache: the latent, normed             |
| k_rope  | [R, N, P]   | dtype of the cache: the shared key, rotated        |
| scratch | [R, N, D+P] | bfloat16 or float32, written in place and returned |

The rows stay out of the pages until they are accepted, so that a rejected node leaves no trace;
`cache_commit` copies the accepted ones. Padding rows are written too and never read.

Rounding: none.
Errors: ValueError when shapes or dtypes do not fit.
Source: DeepSeek-V2 (arXiv 2405.04434), sections 2.1.2 and 2.1.3: what its attention caches.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost

TOLERANCE = 0


def kv_append(latent: np.ndarray, k_rope: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Fill the scratch rows of all nodes."""
    width = latent.shape[-1] + k_rope.shape[-1]
    if latent.shape[:-1] != k_rope.shape[:-1] or scratch.shape != (*latent.shape[:-1], width):
        raise ValueError(
            f"latent {latent.shape} and k_rope {k_rope.shape} do not fit scratch {scratch.shape}"
        )
    if not latent.dtype == k_rope.dtype == scratch.dtype:
        raise ValueError(
            f"latent {latent.dtype}, k_rope {k_rope.dtype}, scratch {scratch.dtype} must agree"
        )
    scratch[..., : latent.shape[-1]] = latent
    scratch[..., latent.shape[-1] :] = k_rope
    return scratch


CASES: dict[str, dict] = {
    "root_only": dict(R=1, N=1, D=64, P=16),
    "two_requests": dict(R=2, N=17, D=64, P=16),
    "odd": dict(R=3, N=5, D=7, P=3),
    "k26": dict(R=1, N=17, D=512, P=64),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    rows = (case["R"], case["N"])
    latent = rng.standard_normal((*rows, case["D"])).astype(BF16)
    k_rope = rng.standard_normal((*rows, case["P"])).astype(BF16)
    scratch = np.full((*rows, case["D"] + case["P"]), np.nan, BF16)
    return dict(latent=latent, k_rope=k_rope, scratch=scratch)


def cost(case: dict) -> Cost:
    return Cost(bytes=2 * 2 * case["R"] * case["N"] * (case["D"] + case["P"]), flops=0)
