"""Choice of experts: by sigmoid score plus bias; the weights come from the score without the bias.

    s = sigmoid(h @ gate^T)                         float32
    experts = the k largest of s + bias             descending, lower id first on ties, NaN last
    weights = s[experts] / (sum of s[experts] + 1e-20) * scaling

| name    | shape  | dtype, meaning                                           |
|---------|--------|----------------------------------------------------------|
| h       | [T, H] | bfloat16 or float32                                      |
| gate    | [E, H] | bfloat16 or float32                                      |
| bias    | [E]    | float32; in bfloat16 its small differences would be lost |
| k       | scalar | int: experts a token, 1 .. E                             |
| scaling | scalar | float: factor of the weights                             |
| sizes   | [R]    | int32, or None: of T / R rows each how many are real     |
| experts | [T, k] | int32                                                    |
| weights | [T, k] | float32                                                  |

Rows of padding choose what the first row of theirs does: they ask for no further expert's weights.

An expert whose score is NaN comes after all others, by id: a row of NaN picks experts 0 .. k-1 with
weights of NaN, and no other row notices.

Rounding: nothing below float32; the sum runs in the order of the picks.
Errors: ValueError for k < 1, k > E, a bias that is not float32 [E], a gate of another width.
Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, and its modelling code
(`modeling_deepseek.py`, `MoEGate`, one group of experts); the order of ties is ours.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost, largest, matvec

TOLERANCE = dict(rtol=1e-4, atol=1e-6)  # weights; experts are exact but for near-ties


def router(
    h: np.ndarray,
    gate: np.ndarray,
    bias: np.ndarray,
    k: int,
    scaling: float,
    sizes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(experts, weights) of every row."""
    count = len(gate)
    if sizes is not None:
        h = h[chooser(len(h), sizes)]
    if not 1 <= k <= count:
        raise ValueError(f"cannot pick {k} of {count} experts")
    if bias.shape != (count,) or bias.dtype != np.float32:
        raise ValueError(f"bias must be float32 [{count}], not {bias.dtype} {bias.shape}")
    if h.shape[-1] != gate.shape[-1]:
        raise ValueError(f"gate {gate.shape} does not fit rows of {h.shape}")
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        scores = np.float32(1) / (np.float32(1) + np.exp(-matvec(h, gate)))
    experts = largest(scores + bias, k)
    picked = np.take_along_axis(scores, experts, axis=-1)
    total = np.cumsum(picked, axis=-1)[..., -1:]  # cumsum adds in order, sum does not promise it
    weights = picked / (total + np.float32(1e-20)) * np.float32(scaling)
    return experts.astype(np.int32), weights


def chooser(rows: int, sizes: np.ndarray) -> np.ndarray:
    """The row whose choice each row takes: its own, or that of the first one."""
    if not len(sizes) or rows % len(sizes):
        raise ValueError(f"{rows} rows are no multiple of {len(sizes)} sizes")
    row, width = np.arange(rows), max(rows // len(sizes), 1)
    return np.where(row % width < sizes[row // width], row, row - row % width)


CASES: dict[str, dict] = {
    "one_expert": dict(T=1, H=32, E=1, k=1),
    "no_row": dict(T=0, H=32, E=8, k=2),
    "all_experts": dict(T=5, H=32, E=8, k=8),
    "odd": dict(T=3, H=33, E=33, k=5),
    "past_the_block": dict(T=65, H=32, E=385, k=8),
    "tiny": dict(T=17, H=192, E=12, k=4),
    "padding": dict(T=15, H=32, E=24, k=3, sizes=(5, 1, 3)),
    "k26": dict(T=17, H=7168, E=384, k=8),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    h = rng.standard_normal((case["T"], case["H"])).astype(BF16)
    gate = (rng.standard_normal((case["E"], case["H"])) / np.sqrt(case["H"])).astype(BF16)
    bias = rng.uniform(-0.2, 0.2, case["E"]).astype(np.float32)
    sizes = np.array(case["sizes"], np.int32) if "sizes" in case else None
    return dict(h=h, gate=gate, bias=bias, k=case["k"], scaling=2.827, sizes=sizes)


def cost(case: dict) -> Cost:
    rows, width, count = case["T"], case["H"], case["E"]
    moved = 2 * width * (rows + count) + 4 * count + 8 * rows * case["k"]
    return Cost(bytes=moved, flops=2 * rows * width * count)
