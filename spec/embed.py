"""Token embedding, of a whole vocabulary or of one rank's share.

    out[t] = table[token_ids[t] - first_row]          zeros for a token outside the table

| name      | shape  | dtype, meaning                                           |
|-----------|--------|----------------------------------------------------------|
| token_ids | [T]    | integer; -1 is padding                                   |
| table     | [V, H] | bfloat16 or float32: rows first_row .. first_row + V - 1 |
| first_row | scalar | int: id of the table's first row                         |
| dtype     | scalar | dtype of out; None: that of the table                    |
| out       | [T, H] | dtype, else that of the table                            |

With a vocabulary cut over ranks each rank holds a range of rows, and the sum over ranks is the
embedding: exactly one rank adds something other than zero.

Rounding: none, unless `dtype` is narrower than the table.
Errors: none; every id outside the range, negative ones included, gives a row of zeros.
Source: the vocabulary-parallel embedding of Megatron-LM (arXiv 1909.08053), section 3.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, Cost

TOLERANCE = 0


def embed(
    token_ids: np.ndarray, table: np.ndarray, first_row: int = 0, dtype: np.dtype | None = None
) -> np.ndarray:
    """The table's row of every token."""
    rows = np.asarray(token_ids).astype(np.int64) - first_row
    held = (rows >= 0) & (rows < len(table))
    out = np.zeros((len(rows), table.shape[1]), dtype or table.dtype)
    out[held] = table[rows[held]].astype(out.dtype, copy=False)
    return out


CASES: dict[str, dict] = {
    "one_row": dict(T=1, V=32, H=16),
    "no_row": dict(T=0, V=32, H=16),
    "second_shard": dict(T=17, V=32, H=16, first_row=32, vocabulary=64),
    "odd_width": dict(T=5, V=7, H=9),
    "tiny": dict(T=17, V=2048, H=192),
    "k26": dict(T=17, V=20480, H=7168, first_row=20480, vocabulary=163840),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    table = rng.standard_normal((case["V"], case["H"])).astype(BF16)
    token_ids = rng.integers(0, case.get("vocabulary", case["V"]), case["T"]).astype(np.int32)
    token_ids[3::4] = -1
    return dict(token_ids=token_ids, table=table, first_row=case.get("first_row", 0))


def cost(case: dict) -> Cost:
    return Cost(bytes=case["T"] * (4 + 2 * 2 * case["H"]), flops=0)
