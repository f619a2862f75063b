"""Many tokens an expert: tiles of up to 32 pairs, so that a dequantised weight is used four times.

A block has 256 weight rows, a warp 32 of them; the tile's activations are shared by all. A stage
is a record or two deep: weights, of which each warp copies its own, and the pairs' rows. The ring
runs on across items, as in the narrow kernels. Sums stay with their warp, a chain of mma for
each slice; those of earlier slices wait in shared memory, and slices are added in order: the bits
of a pair are those of the narrow kernels.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import kernel
from ddtree_numba.kernels.moe_arithmetic import UNSCALED, dequantize, gated, multiply, scales
from ddtree_numba.kernels.moe_records import BYTES, COLUMNS, ROWS, SCALES, WORDS, slices
from ddtree_numba.kernels.moe_tiles import NARROW, WARP, WIDE, Program
from ddtree_numba.kernels.numerics import divided

WARPS, THREADS = 8, 256
EACH = 2  # row tiles of a warp
BLOCK_TILES = WARPS * EACH
PIECES = BYTES // 16  # of a record
LINE = 2 * COLUMNS  # bytes of a pair's row along a record
LINES = WIDE * LINE
GROUPS = WIDE // NARROW
SUMS = EACH * GROUPS * 4  # of a lane


class Schedule(NamedTuple):
    """What changes time and not bits."""

    records: int = 2  # of a stage
    ring: int = 2  # stages
    blocks: int = 2  # of a multiprocessor


PRODUCT = Schedule()


@cuda.jit(device=True, inline="always")
def line_of(row, half):
    """Where the half of a pair's row lies: odd rows swap theirs, so that no bank is met twice."""
    return row * LINE + ((half ^ row) & 1) * (LINE // 2)


@cuda.jit(device=True, inline="always")
def add4(at, chain, n):
    """Earlier chains before this one."""
    a, b, c, d = ptx.lds4_f(at)
    chain[n], chain[n + 1] = a + chain[n], b + chain[n + 1]
    chain[n + 2], chain[n + 3] = c + chain[n + 2], d + chain[n + 3]


@cuda.jit(device=True, inline="always")
def put4(at, chain, n):
    ptx.sts4_f(at, chain[n], chain[n + 1], chain[n + 2], chain[n + 3])
    for i in range(4):
        chain[n + i] = float32(0)


def products(groups: int, records: int):
    """A device function: a stage times `groups` groups of eight pairs, without a branch."""
    part = records * BYTES

    @cuda.jit(device=True, inline="always")
    def multiply_stage(weights, weight_scales, rows, other_half, chain):
        a = cuda.local.array(16, uint32)
        b = cuda.local.array(4, uint32)
        words = cuda.local.array(8, uint32)
        group_scales = cuda.local.array(4, uint32)
        factors = cuda.local.array(4, uint32)
        addends = cuda.local.array(4, uint32)
        for k in range(records):
            for r in range(EACH):
                at, w = r * part + k * BYTES, 4 * r
                words[w], words[w + 1], words[w + 2], words[w + 3] = ptx.lds4(weights + at)
                group_scales[2 * r], group_scales[2 * r + 1] = ptx.lds2(weight_scales + at)
            for h in range(2):
                for r in range(EACH):
                    w = 4 * r + 2 * h
                    scales(group_scales[2 * r + h], factors, addends, 2 * r)
                    dequantize(words[w], factors, addends, 2 * r, a, 8 * r)
                    dequantize(words[w + 1], factors, addends, 2 * r, a, 8 * r + 4)
                for g in range(groups):
                    at = k * LINES + g * (NARROW * LINE) + h * other_half
                    b[0], b[1], b[2], b[3] = ptx.lds4(rows + at)
                    for r in range(EACH):
                        c = 4 * (r * GROUPS + g)
                        multiply(chain, c, a, 8 * r, b, 0)
                        multiply(chain, c, a, 8 * r + 4, b, 2)

    return multiply_stage


@cache
def make(depth: int, gate_up: bool, schedule=PRODUCT, raw: bool = False) -> Program:
    """As in `moe_sliced.py`."""
    own = depth // slices(depth)  # records of a chain
    records = schedule.records if own % schedule.records == 0 else 1
    own_steps, steps = own // records, depth // records
    ring = min(schedule.ring, steps + 1)
    ahead, last_slot = ring - 1, ring - 1
    part = records * BYTES  # bytes of a row tile in a stage
    of_warp = EACH * part
    all_weights = WARPS * of_warp
    stage = all_weights + records * LINES
    full, tail = records * PIECES // WARP, records * PIECES % WARP
    tile_words = depth * WORDS
    columns = depth * COLUMNS
    gate = gate_up and not raw
    element, tile_width = (bf16, ROWS // 2) if gate else (float32, ROWS)
    kind = ("gate_up" if gate_up else "down") + ("_raw" if raw else "")
    two, three, four = (products(groups, records) for groups in (2, 3, 4))

    @cuda.jit(device=True, inline="always")
    def row_of(pair, picks):
        if gate_up:
            pair = int32(ptx.divide(pair, picks))
        return pair * columns

    @cuda.jit(device=True, inline="always")
    def fetch(slot, source, wanted, lane):
        if wanted:
            for r in range(EACH):
                for f in range(full):
                    ptx.copy16(slot + (r * part + f * 512), source, r * tile_words + f * 128)
            if lane < tail:
                for r in range(EACH):
                    at = r * tile_words + full * 128
                    ptx.copy16(slot + (r * part + full * 512), source, at)

    @cuda.jit(device=True, inline="always")
    def fetch_row(slot, row, wanted):
        if wanted:
            for k in range(records):
                ptx.copy16(slot + k * LINES, row, k * COLUMNS)

    @kernel(
        threads=THREADS,
        name=f"moe_{kind}_wide_{columns}_" + "_".join(map(str, schedule)),
        min_blocks=schedule.blocks,
        shared_bytes=ring * stage + 4 * SUMS * THREADS,
        registers=128,
        opcodes=("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "HFMA2"),
        pdl=True,
    )
    @cuda.jit
    def wide_kernel(
        x: read(bf16),
        records_of: read(uint32),
        plan: read(int32),
        pairs: read(int32),
        out: write(element),
        count: int32,
        picks: int32,
        experts: int32,
        tiles: int32,
        first_tile: int32,
        own_tiles: int32,
        groups: int32,
        step_count: int32,
    ):
        memory = ptx.shared_address(cuda.shared.array(0, uint32, alignment=16))
        thread = int32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        column, quad = lane >> 2, lane & 3
        put = memory + warp * of_warp + lane * 16
        copied = 4 * warp + (lane >> 3)  # the pair of whose row this lane copies pieces
        put_row = memory + all_weights + line_of(copied, lane >> 2 & 1) + quad * 16
        got_scales = memory + warp * of_warp + 4 * SCALES + column * 8
        got_rows = memory + all_weights + line_of(column, 0) + quad * 16
        other_half = LINE // 2 if column & 1 == 0 else -(LINE // 2)
        earlier = memory + ring * stage + thread * 16  # the sums of earlier chains
        stream = ptx.at(records_of, (first_tile + warp * EACH) * tile_words + lane * 4)
        piece = ptx.at(x, (lane & 7) * 8)
        expert_words = tiles * tile_words
        tile, group = divided(cuda.blockIdx.x, groups)
        over, group_over = divided(cuda.gridDim.x, groups)
        ptx.wait_for_previous()
        ptx.launch_next()
        tile_count, entry = int32(plan[0]), int32(plan[1 + tile])
        last_tile = int32(tile_count - 1)
        if tile < tile_count:
            later_entry = int32(0)
            next_tile, next_group = int32(tile + over), int32(group + group_over)
            if next_group >= groups:
                next_tile, next_group = int32(next_tile + 1), int32(next_group - groups)
            next_entry = int32(plan[1 + min(next_tile, last_tile)])
            pair = int32(pairs[tile * WIDE + min(lane, int32((entry >> 16) - 1))])
            active = group * BLOCK_TILES + warp * EACH < own_tiles
            place = (entry & 0xFFFF) * expert_words + group * (BLOCK_TILES * tile_words)
            source = ptx.at(stream, place)
            row = ptx.at(piece, row_of(int32(ptx.shfl_idx(pair, copied)), picks))
            with_weights = active
            with_row = copied < max((entry >> 16) + 7 & -8, 16)  # whole groups, two at least
            for s in range(ahead):
                fetch(put + s * stage, source, with_weights, lane)
                fetch_row(put_row + s * stage, row, with_row)
                ptx.copy_commit()
                source, row = ptx.at(source, records * WORDS), ptx.at(row, records * COLUMNS)
            taken = int32(0)
            chain = cuda.local.array(SUMS, float32)
            while tile < tile_count:
                more = next_tile < tile_count
                later_tile, later_group = int32(next_tile + over), int32(next_group + group_over)
                if later_group >= groups:
                    later_tile, later_group = int32(later_tile + 1), int32(later_group - groups)
                there = min(next_tile, last_tile) * WIDE
                next_pair = int32(pairs[there + min(lane, int32((next_entry >> 16) - 1))])
                next_active = next_group * BLOCK_TILES + warp * EACH < own_tiles
                for n in range(SUMS):
                    chain[n] = float32(0)
                step, in_chain = int32(0), int32(0)
                while step < step_count:
                    ptx.copy_wait(ring - 2)
                    cuda.syncthreads()
                    filling = taken + ahead * stage if taken == 0 else taken - stage
                    if step == steps - ahead:
                        # for the item after next: in time, and waited for by nobody
                        later_entry = int32(plan[1 + min(later_tile, last_tile)])
                        place = (next_entry & 0xFFFF) * expert_words
                        source = ptx.at(stream, place + next_group * (BLOCK_TILES * tile_words))
                        row = ptx.at(piece, row_of(int32(ptx.shfl_idx(next_pair, copied)), picks))
                        with_weights = more and next_active
                        with_row = more and copied < max((next_entry >> 16) + 7 & -8, 16)
                    fetch(put + filling, source, with_weights, lane)
                    fetch_row(put_row + filling, row, with_row)
                    ptx.copy_commit()
                    source, row = ptx.at(source, records * WORDS), ptx.at(row, records * COLUMNS)
                    weights, weight_scales, rows = put + taken, got_scales + taken, got_rows + taken
                    if active:
                        if entry >> 16 > 24:
                            four(weights, weight_scales, rows, other_half, chain)
                        elif entry >> 16 > 16:
                            three(weights, weight_scales, rows, other_half, chain)
                        else:
                            two(weights, weight_scales, rows, other_half, chain)
                    in_chain = int32(in_chain + 1)
                    if in_chain == own_steps:
                        in_chain = int32(0)
                        for n in range(0, SUMS, 4):
                            at = earlier + n * (4 * THREADS)
                            if step >= own_steps:
                                add4(at, chain, n)
                            if step < step_count - 1:
                                put4(at, chain, n)
                    taken = int32(taken + stage if taken != last_slot * stage else 0)
                    step = int32(step + 1)
                width = own_tiles * tile_width
                first = (group * BLOCK_TILES + warp * EACH) * tile_width + column
                for g in range(GROUPS):
                    for side in range(2):
                        token = g * NARROW + 2 * quad + side
                        owner = int32(ptx.shfl_idx(pair, token))
                        if active and token < entry >> 16:
                            for r in range(EACH):
                                c = 4 * (r * GROUPS + g) + side
                                above, below = chain[c] * UNSCALED, chain[c + 2] * UNSCALED
                                to = owner * width + first + r * tile_width
                                if gate:
                                    out[to] = ptx.round_bf16(gated(above, below))
                                else:
                                    out[to] = above
                                    out[to + 8] = below
                tile, group, entry, pair = next_tile, next_group, next_entry, next_pair
                next_tile, next_group, next_entry = later_tile, later_group, later_entry
                active = next_active
            ptx.copy_wait(0)

    return Program(wide_kernel, BLOCK_TILES, 1, schedule.blocks, steps)
