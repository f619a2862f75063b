"""Linear layer without bias.

    out[t, n] = sum over k of x[t, k] * weight[n, k]

| name      | shape  | dtype, meaning                                         |
|-----------|--------|--------------------------------------------------------|
| x         | [T, K] | bfloat16 or float32                                    |
| weight    | [N, K] | bfloat16, or float32 that was widened before           |
| out_dtype | scalar | dtype of out (float32 for the logits); None: that of x |
| out       | [T, N] | out_dtype, else that of x                              |

The order of the sum is a function of the weight's shape alone; a row never meets another row.

Rounding: products and sums in float32; out, once.
Errors: ValueError when K differs.
Source: the projections of DeepSeek-V3's modelling code (transformers, `models/deepseek_v3`); a
product a row is ours (`numerics.matvec`).
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost, matvec

TOLERANCE = dict(rtol=2**-7, atol=2e-3)  # another order of the sum


def linear(x: np.ndarray, weight: np.ndarray, out_dtype: np.dtype | None = None) -> np.ndarray:
    """Rows of x times the weight, transposed."""
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"weight {weight.shape} does not fit rows of {x.shape}")
    return matvec(x, weight).astype(out_dtype or x.dtype, copy=False)


CASES: dict[str, dict] = {
    "one_row": dict(T=1, N=192, K=256),
    "no_row": dict(T=0, N=192, K=256),
    "seventeen_rows": dict(T=17, N=192, K=256),
    "odd": dict(T=3, N=7, K=33),
    "one_by_one": dict(T=2, N=1, K=1),
    "logits": dict(T=5, N=2048, K=192, out_dtype=np.float32),
    "k26": dict(T=17, N=2112, K=7168),
    "k26_q_b": dict(T=17, N=1536, K=1536),
    "k26_o": dict(T=17, N=7168, K=1024),
    "k26_dense_gate_up": dict(T=17, N=4608, K=7168),
    "k26_dense_down": dict(T=17, N=7168, K=2304),
    "k26_shared_gate_up": dict(T=17, N=512, K=7168),
    "k26_shared_down": dict(T=17, N=7168, K=256),
    "k26_logits": dict(T=17, N=20480, K=7168, out_dtype=np.float32),
    "k26_draft_fc": dict(T=8, N=7168, K=43008),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    x = rng.standard_normal((case["T"], case["K"])).astype(BF16)
    weight = (rng.standard_normal((case["N"], case["K"])) / np.sqrt(case["K"])).astype(BF16)
    return dict(x=x, weight=weight, out_dtype=case.get("out_dtype"))


def cost(case: dict) -> Cost:
    rows, outs, ins = case["T"], case["N"], case["K"]
    out_size = np.dtype(case.get("out_dtype", BF16)).itemsize
    moved = 2 * (rows * ins + outs * ins) + out_size * rows * outs
    return Cost(bytes=moved, flops=2 * rows * outs * ins)
