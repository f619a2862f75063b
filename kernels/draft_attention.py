"""Attention of the drafter's block on the device; see `spec/draft_attention.py`.

Two launches: every split of a request's positions (`draft_attention_split.py`), then the splits'
sums added in position order (`draft_attention_merge.py`). The grids follow from shapes alone;
lengths stay on the device.

A request has at most 132 splits, evenly long, which its own length decides: bits do not depend on
other requests, nor on the size of the page table. All query rows of a key head share the keys that
a block reads.

The running maximum stays until a weight would exceed 2**8, so that sums are seldom rescaled. The
specification's moves at once; its tolerance has room for the difference.
"""

import math

from ddtree_numba.kernels.arguments import bf16, element_of, require
from ddtree_numba.kernels.draft_attention_merge import make_merge
from ddtree_numba.kernels.draft_attention_split import SPLITS, make
from ddtree_numba.kernels.draft_attention_steps import PAGE
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.pieces import strides_of

WIDTHS = (32, 64, 128)  # columns of a head
MOST_ROWS = 128  # query rows of a key head
ALL = 1 << 30  # a window without end
LOG2_E = math.log2(math.e)  # weights are powers of two


def workspace_words(q_shape: tuple[int, ...], kv_heads: int, table_width: int) -> int:
    """float32 words for queries of this shape; what they hold before and after does not matter."""
    requests, block, heads, width = q_shape
    rows = 16 * _tiles(block * heads // kv_heads, width)
    return requests * kv_heads * _splits(table_width) * rows * (width + 2)


def draft_attention(
    q,
    k,
    v,
    pages,
    page_table,
    lengths,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    *,
    workspace,
    out,
    stream=None,
):
    """Every block row over its context and its block, into out; returns out.

    Pages, page_table and lengths are read ahead of the wait: see `pdl` of `launch.Kernel`. q, k and
    v may be parts of wider rows.
    """
    requests, block, heads, width = q.shape
    kv_heads = k.shape[2]
    _check(q, k, v, pages, page_table, lengths, window, out)
    group, table_width = heads // kv_heads, page_table.shape[1]
    tiles, splits = _tiles(block * group, width), _splits(table_width)
    least = workspace_words(q.shape, kv_heads, table_width)
    require("workspace", workspace, (max(len(workspace), least),), "float32")
    sums = least // (width + 2) * width
    window = ALL if window is None else min(window, ALL)
    make(width, tiles).launch(
        (splits, kv_heads, requests),
        *(q, *strides_of("q", q, 2, 8), k, *strides_of("k", k, 2, 8), v, *strides_of("v", v, 2, 8)),
        *(pages, page_table, table_width, lengths, block, group),
        *(scale * LOG2_E, causal, window, splits, workspace[:sums], workspace[sums:least]),
        stream=stream,
    )
    make_merge(width, tiles).launch(
        (tiles * width // 8 * 2, kv_heads, requests),
        *(workspace[:sums], workspace[sums:least], lengths, block, group, window, splits, out),
        stream=stream,
    )
    return out


def _tiles(rows: int, width: int) -> int:
    """Tiles of 16 query rows: 1, 2, 4 or 8, and enough that a group of warps copies 8 positions."""
    return max(1 << (-(-rows // 16) - 1).bit_length(), width // 32)


def _splits(table_width: int) -> int:
    """Of a request, at most: a page each, and one for the block's own rows."""
    return min(max(table_width, 1) + 1, SPLITS)


def _check(q, k, v, pages, page_table, lengths, window, out) -> None:
    requests, block, heads, width = q.shape
    kv_heads = k.shape[2]
    for name, array, shape in (
        ("k", k, (requests, block, kv_heads, width)),
        ("v", v, (requests, block, kv_heads, width)),
        ("pages", pages, (len(pages), PAGE, 2, kv_heads, width)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name}: shape {array.shape}, expected {shape}")
    for name, array in (("q", q), ("k", k), ("v", v), ("pages", pages)):
        if element_of(name, array) is not bf16:
            raise ValueError(f"{name}: dtype {array.dtype}, expected bfloat16")
    require("pages", pages, pages.shape)
    require("page_table", page_table, (requests, page_table.shape[-1]), "int32")
    require("lengths", lengths, (requests,), "int32")
    require("out", out, q.shape, q.dtype)
    if heads % kv_heads:
        raise ValueError(f"q: {heads} heads, expected a multiple of {kv_heads}")
    if width not in WIDTHS:
        raise ValueError(f"q: heads of {width}, expected {', '.join(map(str, WIDTHS))}")
    if block > PAGE:  # the block's rows lie in two pages at most
        raise ValueError(f"q: a block of {block} rows, expected at most {PAGE}")
    if block * heads // kv_heads > MOST_ROWS:
        rows = f"{block} rows of {heads // kv_heads} heads"
        raise ValueError(f"q: {rows} to a key head, expected at most {MOST_ROWS} in all")
    if window is not None and window < 1:
        raise ValueError(f"window: {window} positions show nothing")


def instances() -> list[Kernel]:
    """K2.6's drafter, whatever the ranks, with a block of 8 or 16; the embedded model's."""
    shapes = [(128, 4), (128, 8), (32, 1), (32, 2)]
    return [made(*shape) for shape in shapes for made in (make, make_merge)]
