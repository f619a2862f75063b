"""Mixture of INT4 experts on the device; see `spec/moe_int4.py`.

    group (moe_tiles)      pairs (token, pick) of an expert into tiles
    gate_up (moe_sliced)   h = round(silu(gate) * up), a row a pair
    down (moe_down)        y = down h, float32
    combine (moe_combine)  the picks of a token in their order, and the base

Weights are the 16-row operand of the mma, pairs its 8 columns: how many pairs a tile holds changes
no bit, and so there are three ways, chosen by their number alone. Up to 32 pairs are not grouped.
Where experts have several pairs each, tiles of 32 columns (moe_wide) share the work of
dequantising. In between, memory is what counts, and tiles of 8 stream weights at its rate.

Where all of y is too large, down and combine take a part of the hidden columns at a time. Nothing
is read back, and no launch depends on what was routed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from ddtree_numba.kernels import driver, moe_combine, moe_down, moe_sliced, moe_tiles, moe_wide
from ddtree_numba.kernels.arguments import require
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.moe_records import COLUMNS, ROWS, Records, filled, records_shape
from ddtree_numba.kernels.moe_tiles import (
    DIRECT,
    MOST_EXPERTS,
    NARROW,
    WIDE,
    Program,
    most_tiles,
)
from ddtree_numba.spec.numerics import BF16

BUSY = 8  # pairs an expert, on average, from which wide tiles pay
MOST_PRODUCTS = 16 << 20  # float32 of y at a time, 64 MiB: half the L2 of an RTX PRO 6000
UNGROUPED = 0  # instead of the columns of a tile


@dataclass(frozen=True)
class Workspace:
    """Arrays that a call overwrites, for up to as many rows as `workspace` was asked for."""

    plan: Any  # int32
    pairs: Any  # int32
    hidden: Any  # bfloat16
    products: Any  # float32


def workspace(rows: int, picks: int, down: Records, allocate: Callable) -> Workspace:
    """Each array from allocate(elements, dtype): numpy.empty, cupy.empty."""
    sizes = _sizes(rows * picks, down)
    kinds = "int32", "int32", BF16, "float32"
    return Workspace(*(allocate(n, kind) for n, kind in zip(sizes, kinds, strict=True)))


def _sizes(count: int, down: Records) -> tuple[int, int, int, int]:
    experts, tiles, depth, _ = down.words.shape
    narrow, wide = (most_tiles(count, experts, width) for width in (NARROW, WIDE))
    most_pairs = max(narrow * NARROW, wide * WIDE)
    part = _part(count, tiles) * ROWS
    # Fewer rows take larger parts, but never more than MOST_PRODUCTS or all.
    products = max(count * part, min(count * tiles * ROWS, MOST_PRODUCTS))
    return 1 + max(narrow, wide), most_pairs, count * depth * COLUMNS, products


def _part(count: int, tiles: int) -> int:
    """How many row tiles of down have their products at a time."""
    if count * tiles * ROWS <= MOST_PRODUCTS:
        return tiles
    blocks = MOST_PRODUCTS // (count * ROWS * moe_wide.BLOCK_TILES)
    return max(blocks, 1) * moe_wide.BLOCK_TILES


def moe_int4(
    x, experts, weights, gate_up, down, base=None, *, workspace, out, stream=None, before_base=None
):
    """Every token through its picked experts, and the base, into out; returns out.

    gate_up, down: Records. x, base, out: bfloat16. An id outside of 0 .. E - 1 is padding.
    before_base: is called ahead of the first launch that reads base, which may still be made.
    """
    _check(x, experts, weights, gate_up, down, base, workspace, out)
    rows, picks = experts.shape
    total, tiles, depth, _ = down.words.shape
    count = rows * picks
    if count == 0:
        return out
    direct = count <= DIRECT
    wide = count >= BUSY * total
    width = WIDE if wide else NARROW
    plan, pairs, items = experts, None, count
    if not direct:
        plan, pairs, items = workspace.plan, workspace.pairs, most_tiles(count, total, width)
        group = moe_tiles.make(width)
        blocks = moe_tiles.blocks(count)
        group.launch(blocks, experts, plan, pairs, count, total, stream=stream)
    first, second = programs(gate_up.words.shape[2], depth, tiles, UNGROUPED if direct else width)
    hidden, products = workspace.hidden, workspace.products
    numbers = count, picks, total
    own = 0, gate_up.words.shape[1]
    _run(first, items, own, x, gate_up, plan, pairs, hidden, numbers, stream)
    combine = moe_combine.make(picks, base is not None)
    step = _part(count, tiles)
    for start in range(0, tiles, step):
        own = start, min(step, tiles - start)
        _run(second, items, own, hidden, down, plan, pairs, products, numbers, stream)
        if before_base is not None and start == 0:
            before_base()
        columns = own[1] * ROWS
        grid = -(-rows * columns // (moe_combine.WIDTH * moe_combine.THREADS))
        part = total, rows, tiles * ROWS, columns, start * ROWS
        combine.launch(grid, products, experts, weights, base, out, *part, stream=stream)
    return out


@cache
def programs(depth: int, down_depth: int, down_tiles: int, way: int) -> tuple[Program, Program]:
    """gate_up and down for rows of so many records; way: columns of a tile, or UNGROUPED."""
    if way == WIDE:
        return moe_wide.make(depth, True), moe_wide.make(down_depth, False)
    direct = way == UNGROUPED
    first = moe_sliced.make(depth, True, direct)
    if down_depth > moe_down.MOST_DEPTH:
        return first, moe_sliced.make(down_depth, False, direct)
    schedule = moe_down.schedule_of(down_depth, down_tiles, direct)
    return first, moe_down.make(down_depth, direct, schedule)


def _run(program, items, own, x, records, plan, pairs, out, numbers, stream) -> None:
    """Row tiles own[0] .. own[0] + own[1] - 1 of every tile of pairs; items: at most so many."""
    groups = -(-own[1] // program.each)
    resident = _resident(program, getattr(x.device, "id", None))
    grid = min(resident, -(-items * groups // program.workers))
    numbers = *numbers, records.words.shape[1], *own, groups, program.steps
    program.kernel.launch(grid, x, records.words, plan, pairs, out, *numbers, stream=stream)


@cache
def _resident(program: Program, device: int | None) -> int:
    """How many blocks run at a time; the CPU executor plays two multiprocessors."""
    if device is None:
        return 2 * program.blocks
    shared = driver.attribute(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
    fitting = driver.blocks_that_fit(program.kernel.shared_bytes, shared)
    return driver.attribute(device, "MULTIPROCESSOR_COUNT") * min(program.blocks, fitting)


def _check(x, experts, weights, gate_up, down, base, workspace, out) -> None:
    rows, width = x.shape
    picks = experts.shape[-1]
    require("x", x, (rows, width), BF16)
    require("experts", experts, (rows, picks), "int32")
    require("weights", weights, (rows, picks), "float32")
    total = len(gate_up.words)
    inner = gate_up.shape[0] // 2
    if gate_up.shape[1] != width or down.shape != (width, inner) or not gate_up.gated > down.gated:
        raise ValueError(f"experts {gate_up.shape}, {down.shape} do not fit rows of {x.shape}")
    if total > MOST_EXPERTS:
        raise ValueError(f"{total} experts, at most {MOST_EXPERTS}")
    require("gate_up", gate_up.words, records_shape(total, gate_up.shape, True), "uint32")
    require("down", down.words, records_shape(total, down.shape, False), "uint32")
    if base is not None:
        require("base", base, x.shape, BF16)
    require("out", out, x.shape, BF16)
    given = workspace.plan, workspace.pairs, workspace.hidden, workspace.products
    if any(len(a) < n for a, n in zip(given, _sizes(rows * picks, down), strict=True)):
        raise ValueError(f"workspace: too small for {rows} rows of {picks} picks")


def instances() -> list[Kernel]:
    """Of K2.6 and of the embedded model, each at 1, 2, 4 and 8 ranks."""
    made: dict[str, Kernel] = {}
    for hidden, inner in ((7168, 2048), (192, 256)):
        for ranks, way in product((1, 2, 4, 8), (UNGROUPED, NARROW, WIDE)):
            depth, down_depth = (filled(n) // COLUMNS for n in (hidden, inner // ranks))
            pair = programs(depth, down_depth, hidden // ROWS, way)
            made |= {program.kernel.name: program.kernel for program in pair}
    return list(made.values())
