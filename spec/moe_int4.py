"""Mixture of INT4 experts: every token through its k picks, summed in the order of the picks.

    pick j, expert e:  a = gate_up[e] @ x      h = round(silu(a[:I]) * a[I:])      y_j = down[e] @ h
    out = round(weights[0] y_0 + weights[1] y_1 + .. + base)           left to right, float32

| name    | shape       | dtype, meaning                                                  |
|---------|-------------|-----------------------------------------------------------------|
| x       | [T, H]      | bfloat16 or float32                                             |
| experts | [T, k]      | int32; -1 is padding and adds nothing                           |
| weights | [T, k]      | float32: `router`'s, its scaling included                       |
| gate_up | [E, 2 I, H] | Int4Matrix: an expert's weight is bf16(q * scale)               |
| down    | [E, H, I]   | Int4Matrix; under tensor parallelism a slice of I               |
| base    | [T, H]      | the shared expert's output, the same slice of it; None: nothing |
| out     | [T, H]      | dtype of x: this rank's partial sum                             |

A product never depends on the expert's other tokens, and a token's sum never on the order in which
experts are visited.

Rounding: float32 inside; h and out to the dtype of x, once each.
Errors: ValueError when shapes do not fit or an expert id is not below E.
Source: DeepSeekMoE (arXiv 2401.06066), section 3, and DeepSeek-V3 (arXiv 2412.19437), section
2.1.2; weights as compressed-tensors packs them (`compressors/pack_quantized`).
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, F32, Cost, Int4Matrix, matvec, pack_int4, widen
from ddtree_numba.spec.swiglu import swiglu

TOLERANCE = dict(rtol=2**-6, atol=4e-3)  # another order of the sums; h may round the other way


def moe_int4(
    x: np.ndarray,
    experts: np.ndarray,
    weights: np.ndarray,
    gate_up: Int4Matrix,
    down: Int4Matrix,
    base: np.ndarray | None = None,
) -> np.ndarray:
    """Every token through its picked experts, and the base."""
    _check(x, experts, weights, gate_up, down, base)
    outputs = np.zeros((*experts.shape, x.shape[1]), F32)  # [T, k, H]
    for expert in np.unique(experts[experts >= 0]).tolist():
        token, pick = np.nonzero(experts == expert)
        hidden = swiglu(matvec(x[token], gate_up.dense(expert))).astype(x.dtype)
        outputs[token, pick] = weights[token, pick, None] * matvec(hidden, down.dense(expert))
    total = np.zeros(x.shape, F32)
    for j in range(experts.shape[1]):
        total += outputs[:, j]
    if base is not None:
        total += widen(base)
    return total.astype(x.dtype, copy=False)


def _check(x, experts, weights, gate_up, down, base) -> None:
    inner = gate_up.shape[0] // 2
    if gate_up.shape[1] != x.shape[1] or tuple(down.shape) != (x.shape[1], inner):
        raise ValueError(f"experts {gate_up.shape}, {down.shape} do not fit rows of {x.shape}")
    if experts.shape != weights.shape or len(experts) != len(x):
        raise ValueError(f"picks {experts.shape}, {weights.shape} do not fit rows of {x.shape}")
    if base is not None and base.shape != x.shape:
        raise ValueError(f"base {base.shape} does not fit x {x.shape}")
    if experts.size and experts.max() >= len(gate_up.packed):
        raise ValueError(f"expert {experts.max()} of {len(gate_up.packed)}")


CASES: dict[str, dict] = {
    "one_row": dict(T=1, k=2, E=4, H=64, I=32),
    "no_row": dict(T=0, k=2, E=4, H=64, I=32),
    "all_to_one": dict(T=65, k=1, E=4, H=64, I=32, experts=[0]),
    "all_to_the_last": dict(T=33, k=1, E=5, H=64, I=32, experts=[4]),
    "lopsided": dict(T=65, k=1, E=3, H=64, I=32, experts=[1] + 64 * [2]),
    "mostly_empty": dict(T=4, k=2, E=384, H=32, I=32),
    "padding": dict(T=9, k=3, E=5, H=64, I=32, padding=True),
    "base": dict(T=9, k=3, E=5, H=64, I=32, base=True),
    "tiny": dict(T=17, k=4, E=12, H=192, I=256, base=True),
    "k26": dict(T=17, k=8, E=384, H=7168, I=256, base=True),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    rows, picks, count, width, inner = (case[name] for name in ("T", "k", "E", "H", "I"))
    if "experts" in case:
        experts = np.resize(np.array(case["experts"], np.int32), (rows, picks))
    else:
        ids = [rng.permutation(count)[:picks] for _ in range(rows)]
        experts = np.array(ids, np.int32).reshape(rows, picks)
    if case.get("padding"):
        experts[-2:] = -1
    return dict(
        x=rng.standard_normal((rows, width)).astype(BF16),
        experts=experts,
        weights=rng.uniform(0.1, 1.0, (rows, picks)).astype(F32),
        gate_up=random_int4(count, 2 * inner, width, rng),
        down=random_int4(count, width, inner, rng),
        base=rng.standard_normal((rows, width)).astype(BF16) if case.get("base") else None,
    )


def random_int4(count: int, rows: int, columns: int, rng: np.random.Generator) -> Int4Matrix:
    values = rng.integers(-8, 8, (count, rows, columns)).astype(np.int8)
    scale = rng.uniform(0.5, 1.5, (count, rows, columns // 32)) / (4.6 * np.sqrt(columns))
    return Int4Matrix(pack_int4(values), scale.astype(BF16), (rows, columns))


def cost(case: dict) -> Cost:
    """Weights of the distinct experts that uniform routing reaches, and the rows."""
    rows, picks, count, width, inner = (case[name] for name in ("T", "k", "E", "H", "I"))
    reached = count * (1 - (1 - picks / count) ** rows)
    weight_bytes = 3 * width * inner * (0.5 + 2 / 32)
    row_bytes = 2 * width * (3 if case.get("base") else 2) + 8 * picks
    flops = 2 * rows * picks * 3 * width * inner
    return Cost(bytes=int(reached * weight_bytes) + rows * row_bytes, flops=flops)
