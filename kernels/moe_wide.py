"""Many tokens an expert: tiles of up to 32 pairs, so that a dequantised weight is used four times.

A block has 256 weight rows, a warp 64 of them; the tile's activations are shared by all. A stage
is a record or two deep: weights, of which each warp copies its own, and the pairs' rows. The ring
runs on across items, as in the narrow kernels. The words of a record come into registers while the
one before is multiplied. Sums stay with their warp, a chain of mma for each slice, beside the sum
of the slices before: the bits of a pair are those of the narrow kernels.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import kernel
from ddtree_numba.kernels.moe_arithmetic import UNSCALED, gated
from ddtree_numba.kernels.moe_records import BYTES, COLUMNS, ROWS, SCALES, WORDS, slices
from ddtree_numba.kernels.moe_stage import (
    EACH,
    GROUPS,
    LINE,
    LINES,
    SCALES_HELD,
    SUMS,
    WORDS_HELD,
    line_of,
    products,
    rows_of,
    take,
)
from ddtree_numba.kernels.moe_tiles import NARROW, WARP, WIDE, Program
from ddtree_numba.kernels.numerics import divided

WARPS, THREADS = 4, 128
BLOCK_TILES = WARPS * EACH
OWNERS = 2 * GROUPS  # of a lane's sums
PIECES = BYTES // 16  # of a record
LANES = WARP // EACH  # that copy a row tile
COPIES = WIDE * 8 // THREADS  # pieces that a thread copies of the pairs' rows along a record
APART = WIDE // COPIES  # of the pairs of whose rows they are


class Schedule(NamedTuple):
    """What changes time and not bits."""

    records: int = 2  # of a stage
    ring: int = 3  # stages; at least three, if an item has two
    blocks: int = 2  # of a multiprocessor


PRODUCT = Schedule()


@cuda.jit(device=True, inline="always")
def pair_of(pairs, tile, entry, lane):
    """A tile's last pair also stands in the columns behind it."""
    return int32(pairs[tile * WIDE + min(lane, int32((entry >> 16) - 1))])


@cache
def make(depth: int, gate_up: bool, schedule=PRODUCT, raw: bool = False) -> Program:
    """As in `moe_sliced.py`."""
    own = depth // slices(depth)  # records of a chain
    records = schedule.records if own % schedule.records == 0 else 1
    own_steps, steps = own // records, depth // records
    ring = min(schedule.ring, steps + 1)
    early = ring > 2  # words are taken a record ahead
    ahead, last_slot = ring - 1, ring - 1
    part = records * BYTES  # bytes of a row tile in a stage
    all_weights = BLOCK_TILES * part
    stage = all_weights + records * LINES
    full, tail = records * PIECES // LANES, records * PIECES % LANES
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
    def fetch(slot, source, lane):
        for f in range(full):
            ptx.copy16(slot + f * (16 * LANES), source, f * (4 * LANES))
        if tail > 0 and lane % LANES < tail:
            ptx.copy16(slot + full * (16 * LANES), source, full * (4 * LANES))

    @cuda.jit(device=True, inline="always")
    def fetch_rows(slot, x, places, column, wanted):
        """A stage of the rows of this thread's pairs, of which the first `wanted` count."""
        for n in range(COPIES):
            size = 16 if n * APART < wanted else 0
            for k in range(records):
                to = slot + n * (APART * LINE) + k * LINES
                ptx.copy16_part(to, x, places[n] + column + k * COLUMNS, size)

    @cuda.jit(device=True, inline="always")
    def place_rows(pair, copied, picks, places):
        for n in range(COPIES):
            places[n] = row_of(int32(ptx.shfl_idx(pair, copied + n * APART)), picks)

    @kernel(
        threads=THREADS,
        name=f"moe_{kind}_wide_{columns}_" + "_".join(map(str, schedule)),
        min_blocks=schedule.blocks,
        shared_bytes=ring * stage,
        registers=255,
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
        mine = memory + warp * (EACH * part)
        put = mine + lane // LANES * part + lane % LANES * 16
        got = mine + lane * 16
        to_scales = 4 * SCALES + column * 8 - lane * 16
        copied = thread >> 3  # the first pair of whose row this thread copies pieces
        put_row = memory + all_weights + line_of(copied, lane >> 2 & 1) + quad * 16
        got_rows = memory + all_weights + line_of(column, 0) + quad * 16
        other_half = LINE // 2 if column & 1 == 0 else -(LINE // 2)
        in_tile = lane // LANES * tile_words + lane % LANES * 4
        stream = ptx.at(records_of, first_tile * tile_words + in_tile)
        piece = ptx.at(x, (lane & 7) * 8)
        last_own = int32(own_tiles - EACH)  # warps beyond take its rows again, for nothing
        expert_words = tiles * tile_words
        tile, group = divided(cuda.blockIdx.x, groups)
        over, group_over = divided(cuda.gridDim.x, groups)
        if gate_up:
            ptx.wait_for_previous()
            ptx.launch_next()
        tile_count, entry = int32(plan[0]), int32(plan[1 + tile])
        last_tile = int32(tile_count - 1)
        here = tile < tile_count
        next_tile, next_group = int32(tile + over), int32(group + group_over)
        if next_group >= groups:
            next_tile, next_group = int32(next_tile + 1), int32(next_group - groups)
        next_entry = later_entry = pair = next_pair = int32(0)
        source = stream
        if here:
            next_entry = int32(plan[1 + min(next_tile, last_tile)])
            pair = pair_of(pairs, tile, entry, lane)
            next_pair = pair_of(pairs, min(next_tile, last_tile), next_entry, lane)
            first = min(int32(group * BLOCK_TILES + warp * EACH), last_own)
            source = ptx.at(stream, (entry & 0xFFFF) * expert_words + first * tile_words)
            for s in range(ahead):
                fetch(put + s * stage, source, lane)
                source = ptx.at(source, records * WORDS)
        if not gate_up:  # the kernel ahead makes the rows; weights and plan were there before it
            ptx.wait_for_previous()
            ptx.launch_next()
        if here:
            places = cuda.local.array(COPIES, int32)
            place_rows(pair, copied, picks, places)
            wanted = int32(rows_of(entry) - copied)
            for s in range(ahead):
                fetch_rows(put_row + s * stage, piece, places, s * records * COLUMNS, wanted)
                ptx.copy_commit()
            column_in = int32(ahead * records * COLUMNS)
            taken, filling = int32(0), int32(ahead * stage)
            fetching = True
            words = cuda.local.array(WORDS_HELD, uint32)
            group_scales = cuda.local.array(SCALES_HELD, uint32)
            chain = cuda.local.array(SUMS, float32)
            before = cuda.local.array(SUMS, float32)
            owners = cuda.local.array(OWNERS, int32)
            if early:
                ptx.copy_wait(ring - 2)
                cuda.syncwarp()
                take(got, to_scales, part, words, group_scales)
            while tile < tile_count:
                more = next_tile < tile_count
                later_tile, later_group = int32(next_tile + over), int32(next_group + group_over)
                if later_group >= groups:
                    later_tile, later_group = int32(later_tile + 1), int32(later_group - groups)
                for n in range(SUMS):
                    chain[n] = float32(0)
                step, in_chain = int32(0), int32(0)
                while step < step_count:
                    ptx.copy_wait(ring - 3 if early else 0)
                    cuda.syncthreads()
                    if step == steps - ahead:
                        # for the item after next: in time, and waited for by nobody
                        later_entry = int32(plan[1 + min(later_tile, last_tile)])
                        first = min(int32(next_group * BLOCK_TILES + warp * EACH), last_own)
                        place = (next_entry & 0xFFFF) * expert_words + first * tile_words
                        source = ptx.at(stream, place)
                        place_rows(next_pair, copied, picks, places)
                        wanted = int32(rows_of(next_entry) - copied)
                        column_in = int32(0)
                        fetching = more
                    if fetching:
                        fetch(put + filling, source, lane)
                        fetch_rows(put_row + filling, piece, places, column_in, wanted)
                    ptx.copy_commit()
                    source = ptx.at(source, records * WORDS)
                    column_in = int32(column_in + records * COLUMNS)
                    filling = int32(filling + stage if filling != last_slot * stage else 0)
                    now, rows = got + taken, got_rows + taken
                    following = int32(taken + stage if taken != last_slot * stage else 0)
                    ends = not early or (step == step_count - 1 and not more)
                    then, taken = got + (taken if ends else following), following
                    if not early:
                        take(now, to_scales, part, words, group_scales)
                    if entry >> 16 > 24:
                        four(now, rows, other_half, then, to_scales, words, group_scales, chain)
                    elif entry >> 16 > 16:
                        three(now, rows, other_half, then, to_scales, words, group_scales, chain)
                    else:
                        two(now, rows, other_half, then, to_scales, words, group_scales, chain)
                    step = int32(step + 1)
                    in_chain = int32(in_chain + 1)
                    if own < depth and in_chain == own_steps:
                        in_chain = int32(0)
                        if step > own_steps:
                            for n in range(SUMS):
                                chain[n] = before[n] + chain[n]
                        if step < step_count:
                            for n in range(SUMS):
                                before[n], chain[n] = chain[n], float32(0)
                later_pair = pair_of(pairs, min(later_tile, last_tile), later_entry, lane)
                for n in range(OWNERS):  # ahead of the branches, one behind the other
                    owners[n] = int32(ptx.shfl_idx(pair, n // 2 * NARROW + 2 * quad + n % 2))
                width = own_tiles * tile_width
                active = group * BLOCK_TILES + warp * EACH <= last_own
                first = (group * BLOCK_TILES + warp * EACH) * tile_width + column
                for g in range(GROUPS):
                    for side in range(2):
                        token = g * NARROW + 2 * quad + side
                        if active and token < entry >> 16:
                            row = ptx.at(out, owners[2 * g + side] * width + first)
                            for r in range(EACH):
                                c = 4 * (r * GROUPS + g) + side
                                above, below = chain[c] * UNSCALED, chain[c + 2] * UNSCALED
                                to = r * tile_width
                                if gate:
                                    row[to] = ptx.round_bf16(gated(above, below))
                                else:
                                    row[to] = above
                                    row[to + 8] = below
                tile, group, entry, pair = next_tile, next_group, next_entry, next_pair
                next_tile, next_group, next_entry = later_tile, later_group, later_entry
                next_pair = later_pair
            ptx.copy_wait(0)

    return Program(wide_kernel, BLOCK_TILES, 1, schedule.blocks, steps)
