"""Attention of the drafter's block over its context pages and itself (grouped query heads).

    block row i stands at position lengths[r] + i; it sees position p
        always for p < lengths[r] (context) and p in the block, except
        causal:   p <= its own position
        window:   its own position - p < window          (both absolute)
    out = softmax(scale * q . k) . v      head j of q reads head j // (hq / hkv) of k and v

| name       | shape              | dtype, meaning                                              |
|------------|--------------------|-------------------------------------------------------------|
| q          | [R, B, hq, d]      | bfloat16 or float32                                         |
| k, v       | [R, B, hkv, d]     | bfloat16 or float32: the block's rows, k normed and rotated |
| pages      | [P, 64, 2, hkv, d] | bfloat16 or float32: keys, then values                      |
| page_table | [R, M]             | integer; only entries below ceil(lengths[r] / 64) are read  |
| lengths    | [R]                | integer: context positions, 0 allowed                       |
| scale      | scalar             | float: factor of the scores, d^-0.5                         |
| causal     | scalar             | bool: a block row does not see later ones                   |
| window     | scalar             | int: positions in view, its own included; None: all         |
| out        | [R, B, hq, d]      | dtype of q                                                  |

A chunk in which a row sees nothing adds an exact zero, so those that all rows have left behind are
skipped. A block row of NaN may spoil its block, never another request.

Rounding: that of `tree_attention`, with its chunks of 64 absolute positions and its splits:
exp(score - top) to the dtype of q before it meets the values; out, once.
Errors: ValueError when shapes do not fit, heads do not divide, or the window is below 1.
Source: DFlash (z-lab/dflash, `dflash/model.py`); grouped query heads: arXiv 2305.13245.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, F32, Cost, widen
from ddtree_numba.spec.tree_attention import (
    CHUNK,
    RunningSoftmax,
    merge,
    random_pages,
    starts_split,
)

TOLERANCE = dict(rtol=2**-6, atol=2e-3)  # another exp, another order, another top to round at


def draft_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pages: np.ndarray,
    page_table: np.ndarray,
    lengths: np.ndarray,
    scale: float,
    causal: bool = False,
    window: int | None = None,
) -> np.ndarray:
    """Every block row over its context and its block."""
    if k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k {k.shape}, v {v.shape} do not fit q {q.shape}")
    if pages.shape[1:] != (CHUNK, 2, *k.shape[2:]) or q.shape[2] % k.shape[2]:
        raise ValueError(f"pages {pages.shape}, k {k.shape} do not fit q {q.shape}")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} positions shows nothing")
    out = np.empty_like(q)
    for r, length in enumerate(lengths):
        block = np.stack([widen(k[r]), widen(v[r])], axis=1)  # [B, 2, hkv, d]
        rows = _attend(q[r], block, pages, page_table[r], int(length), scale, causal, window)
        out[r] = rows.astype(q.dtype)
    return out


def _attend(q, block, pages, table, length, scale, causal, window) -> np.ndarray:
    count, heads, width = q.shape
    query = widen(q).reshape(count, block.shape[2], -1, width)  # [B, hkv, group, d]
    own = length + np.arange(count)[:, None]  # position of a row
    oldest = 0 if window is None else max(length - window + 1, 0)  # that the first row sees
    splits: list[RunningSoftmax] = []
    for first in range(oldest // CHUNK * CHUNK, length + count, CHUNK):
        if starts_split(first) or not splits:
            splits.append(RunningSoftmax(query.shape[:3], width))
        position = np.arange(first, first + CHUNK)
        seen = np.broadcast_to(position < length + count, (count, CHUNK))
        if causal:
            seen = seen & (position <= own)
        if window is not None:
            seen = seen & (own - position < window)
        rows = _chunk(block, pages, table, length, first, int(position[seen.any(0)][0]))
        keys, values = rows.transpose(1, 2, 0, 3)  # [hkv, CHUNK, d] each
        scores = np.matmul(query, keys.swapaxes(-1, -2)) * F32.type(scale)
        scores = np.where(seen[:, None, None], scores, -np.inf)
        splits[-1].add(slice(None), scores, values, q.dtype)
    return merge(splits).reshape(count, heads, width)


def _chunk(block, pages, table, length, first, oldest) -> np.ndarray:
    """float32[CHUNK, 2, hkv, d]: rows from position `first`, zeros where nobody sees any."""
    rows = np.zeros((CHUNK, *block.shape[1:]), F32)
    here = min(max(length - first, 0), CHUNK)  # context positions of the chunk
    skip = oldest - first
    if skip < here:
        rows[skip:here] = widen(pages[table[first // CHUNK], skip:here])
    own = block[max(first - length, 0) : max(first - length, 0) + CHUNK - here]
    rows[here : here + len(own)] = own
    return rows


CASES: dict[str, dict] = {
    "no_context": dict(lengths=[0], B=8, hq=4, hkv=2, d=16),
    "tiny": dict(lengths=[500], B=8, hq=16, hkv=8, d=32),
    "tiny_rank": dict(lengths=[70, 3], B=8, hq=2, hkv=1, d=32),
    "page_edges": dict(lengths=[1, 56, 63, 64, 65, 128], B=8, hq=4, hkv=2, d=16),
    "split_edges": dict(lengths=[508, 512], B=8, hq=2, hkv=1, d=16),
    "causal": dict(lengths=[60, 0], B=8, hq=4, hkv=4, d=16, causal=True),
    "window": dict(lengths=[300, 5], B=8, hq=4, hkv=2, d=16, window=128),
    "causal_window": dict(lengths=[300, 5], B=8, hq=4, hkv=2, d=16, causal=True, window=64),
    "narrow_window": dict(lengths=[300], B=16, hq=4, hkv=2, d=16, window=3),
    "k26": dict(lengths=[8192], B=8, hq=8, hkv=1, d=128),
    "k26_window": dict(lengths=[8192], B=8, hq=8, hkv=1, d=128, window=4096),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    requests, count, width = len(case["lengths"]), case["B"], case["d"]
    pages, page_table = random_pages(case["lengths"], (2, case["hkv"], width), rng)
    return dict(
        q=rng.standard_normal((requests, count, case["hq"], width)).astype(BF16),
        k=rng.standard_normal((requests, count, case["hkv"], width)).astype(BF16),
        v=rng.standard_normal((requests, count, case["hkv"], width)).astype(BF16),
        pages=pages,
        page_table=page_table,
        lengths=np.array(case["lengths"], np.int32),
        scale=width**-0.5,
        causal=case.get("causal", False),
        window=case.get("window"),
    )


def cost(case: dict) -> Cost:
    count, heads, width = case["B"], case["hq"], case["d"]
    window = case.get("window") or max(case["lengths"]) + count
    keys = sum(min(length, window) + count for length in case["lengths"])
    rows = len(case["lengths"]) * count * heads
    moved = 2 * width * (2 * keys * case["hkv"] + 2 * rows)
    return Cost(bytes=moved, flops=4 * keys * count * heads * width)
