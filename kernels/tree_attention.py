"""Attention of a tree over a paged prefix and its nodes' own paths; see `spec/tree_attention.py`.

Three launches. `plan_attention`, once a step: who does what (`attention_plan.py`). Then, in every
layer, the partials of all splits, by blocks that stay (`attention_partials.py`; plain decoding on a
card with room for it, `attention_pipelined.py`), and their sum (`attention_merge.py`). A split that
is committed in full is shared by a few units, a unit being a node with eight of its heads; the
splits that a node's own path reaches run with that unit alone, each key from its page or from
scratch.

Chunks are 32 keys, splits grow with their position (`attention_splits.py`); the specification's are
64, and others. bfloat16 only. No result depends on the number of blocks, of units a block, or on
what else is in the batch.
"""

from dataclasses import dataclass
from functools import cache
from math import e, log2
from typing import Any

import numpy as np

from ddtree_numba.kernels import (
    attention_merge,
    attention_partials,
    attention_pipelined,
    attention_plan,
    driver,
)
from ddtree_numba.kernels.arguments import require
from ddtree_numba.kernels.attention_merge import MOST, SPAN
from ddtree_numba.kernels.attention_plan import ITEM
from ddtree_numba.kernels.attention_splits import PAGE, SHIFTS, split_of
from ddtree_numba.kernels.attention_tiles import SHALLOW, Layout
from ddtree_numba.kernels.compile import MAX_SHARED
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.spec.numerics import BF16

RING = 4  # tiles of keys where one unit has the block to itself and there is room
UNITS = 1, 3, 5  # of a piece, that kernels are made for: five fill the registers


@dataclass(frozen=True)
class Workspace:
    """Arrays of one step's plan, and of a layer's partials by split and unit; see `workspace`."""

    lasts: Any  # int32[requests, nodes]: the last position that a node sees
    items: Any  # int32[pieces, ITEM]: the pieces of work, see `attention_plan.py`
    ranges: Any  # int32[blocks + 1]: block b does items[ranges[b] : ranges[b + 1]]
    tops: Any  # float32[requests, splits, units, 8, 2]: maximum and total of each head
    partial: Any  # float32[requests, splits, units, latent, 8]: sums, in the mma's own order


def resident(units: int, width: int, latent: int, multiprocessors: int, shared: int) -> int:
    """Blocks that run at a time where a request has `units`; shared: bytes of a multiprocessor."""
    most = compiled_units(units)
    ring = ring_of(width, latent, most, shared)
    fitting = driver.blocks_that_fit(Layout(width, latent, most, ring).bytes, shared)
    return multiprocessors * max(min(fitting, 2 if most == 1 else 1), 1)


def ring_of(width: int, latent: int, units: int, shared: int) -> int:
    """Tiles that a block has, which changes no bit: RING or SHALLOW, see `attention_tiles.py`.

    shared: bytes of a multiprocessor. More than one unit gain nothing from a longer ring.
    """
    fits = driver.blocks_that_fit(Layout(width, latent, units, RING).bytes, shared) > 0
    return RING if units == 1 and fits else SHALLOW


@cache
def _shared_bytes(device: int | None) -> int:
    """Of a multiprocessor; the CPU executor plays one of sm_120."""
    if device is None:
        return MAX_SHARED + driver.RESERVED
    return driver.attribute(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")


def workspace(requests, nodes, depths, heads, latent, positions, blocks) -> dict[str, tuple]:
    """(shape, dtype) of a workspace's arrays.

    positions: committed ones that a request can have at most. blocks: any number, see `resident`.
    """
    parts = -(-heads // 8)
    splits, tails = split_counts(nodes * parts, depths, positions)
    units = shared_units(nodes * parts)
    groups = -(-nodes * parts // units) if units else 0
    items = requests * (nodes * parts * tails + groups * splits)
    partials = requests, splits, nodes * parts
    return dict(
        lasts=((requests, nodes), np.int32),
        items=((items, ITEM), np.int32),
        ranges=((blocks + 1,), np.int32),
        tops=((*partials, 8, 2), np.float32),
        partial=((*partials, latent, 8), np.float32),
    )


def shared_units(units: int) -> int:
    """Units of a piece that several share, of so many of a request; 0: none is shared."""
    groups = max(-(-units // UNITS[-1]), 1)
    return 0 if units == 1 else -(-units // groups)


def compiled_units(units: int) -> int:
    """Units that the kernel is made for, for so many of a request."""
    return next(n for n in UNITS if n >= max(shared_units(units), 1))


def split_counts(units: int, depths: int, positions: int) -> tuple[int, int]:
    """Splits of a request at most, and those that a tail can reach into."""
    splits = split_of.py_func(positions + depths - 1) + 1
    return splits, splits if units == 1 else min(splits, 2 + (depths - 1 >> SHIFTS[0]))


def plan_attention(starts, paths, sizes, *, heads: int, positions: int, workspace, stream=None):
    """Who does what, for every layer of a step, into the workspace; returns it."""
    requests, nodes, depths = paths.shape
    _require_batch(starts, paths, sizes)
    parts = -(-heads // 8)
    blocks = len(workspace.ranges) - 1
    _require_workspace(workspace, requests, nodes, depths, heads, None, positions, blocks)
    each = shared_units(nodes * parts)
    attention_plan.make(each, parts).launch(
        1,
        starts,
        paths,
        sizes,
        requests,
        nodes,
        depths,
        blocks,
        workspace.lasts,
        workspace.items,
        workspace.ranges,
        stream=stream,
    )
    attention_plan.plan_ends.launch(1, workspace.ranges, stream=stream)
    return workspace


def tree_attention(
    q,
    pages,
    scratch,
    page_table,
    starts,
    paths,
    sizes,
    scale: float,
    latent: int,
    *,
    workspace,
    out,
    stream=None,
):
    """Every real node over the positions that it sees, into out; zeros for padding; returns out.

    workspace: with the plan that `plan_attention` made of starts, paths and sizes.
    """
    requests, nodes, heads, width = q.shape
    _, table_width = page_table.shape
    _require_batch(starts, paths, sizes)
    depths = paths.shape[2]
    require("q", q, (requests, nodes, heads, width), BF16)
    require("pages", pages, (len(pages), PAGE, width), BF16)
    require("scratch", scratch, (requests, nodes, width), BF16)
    require("page_table", page_table, (requests, table_width), "int32")
    require("paths", paths, (requests, nodes, depths), "int32")
    require("out", out, (requests, nodes, heads, latent), BF16)
    if width % 16 or latent % 16 or not latent <= width <= latent + 128:
        raise ValueError(f"latent {latent}, width {width}: expected multiples of 16, 128 apart")
    if latent > 128 and latent not in (256, 512):
        raise ValueError(f"latent {latent}: expected up to 128, 256 or 512")
    parts = -(-heads // 8)
    positions = table_width * PAGE
    splits, _ = split_counts(nodes * parts, depths, positions)
    if splits > MOST:
        raise ValueError(f"page_table: {positions} positions make {splits} splits, at most {MOST}")
    blocks = len(workspace.ranges) - 1
    _require_workspace(workspace, requests, nodes, depths, heads, latent, positions, blocks)
    if requests * nodes * heads == 0:
        return out
    units = compiled_units(nodes * parts)
    ring = ring_of(width, latent, units, _shared_bytes(getattr(q.device, "id", None)))
    _partials(width, latent, units, ring).launch(
        blocks,
        q,
        pages,
        scratch,
        page_table,
        paths,
        workspace.items,
        workspace.ranges,
        workspace.tops,
        workspace.partial,
        scale * log2(e),
        nodes,
        heads,
        parts,
        depths,
        table_width,
        splits,
        stream=stream,
    )
    span = attention_merge.tiles_of_block(latent, requests * nodes * parts)
    attention_merge.make(latent, span).launch(
        (latent // (16 * span), nodes * parts, requests),
        workspace.tops,
        workspace.partial,
        workspace.lasts,
        out,
        nodes,
        heads,
        parts,
        splits,
        stream=stream,
    )
    return out


def _require_batch(starts, paths, sizes) -> None:
    requests, nodes, depths = paths.shape
    require("starts", starts, (requests,), "int32")
    require("paths", paths, (requests, nodes, depths), "int32")
    require("sizes", sizes, (requests,), "int32")


def _require_workspace(space, requests, nodes, depths, heads, latent, positions, blocks):
    expected = workspace(requests, nodes, depths, heads, latent or 0, positions, blocks)
    for name, (shape, dtype) in expected.items():
        if latent or name not in ("tops", "partial"):
            require(f"workspace.{name}", getattr(space, name), shape, dtype)


def _partials(width: int, latent: int, units: int, ring: int) -> Kernel:
    if ring == SHALLOW:
        return attention_partials.make(width, latent, units)
    return attention_pipelined.make(width, latent, units, ring)


def instances() -> list[Kernel]:
    """K2.6 and the embedded model, trees of one unit and of more."""
    made = [
        _partials(*shape, units, SHALLOW)
        for shape in ((576, 512), (80, 64))
        for units in UNITS
        if units > 1 or shape[0] > 80
    ]
    made += [_partials(*shape, 1, RING) for shape in ((576, 512), (80, 64))]
    made += [attention_merge.make(latent, span) for latent in (512, 64) for span in (1, SPAN)]
    plans = [attention_plan.make(each, 1) for each in (0, 2, 3, 4, 5)]
    return made + plans + [attention_plan.plan_ends]
