"""Few tokens a tile, long rows: the warps of a block share K. Gate and up, and a wide down.

An item is a tile of up to 8 pairs and `rows` row tiles. Each warp streams its slice of their
records through a private ring of asynchronous copies; blocks walk over the items with a fixed
stride, and the rings run on across items, so that weights never stop coming. The slices' sums meet
in shared memory and are added in order: the slices, a function of the weight's shape, are all that
decides bits.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import kernel
from ddtree_numba.kernels.moe_arithmetic import UNSCALED, dequantize, gated, multiply, scales
from ddtree_numba.kernels.moe_records import BYTES, COLUMNS, ROWS, SCALES, WORDS, slices
from ddtree_numba.kernels.moe_tiles import NARROW, WARP, Program, reader
from ddtree_numba.kernels.numerics import divided

PIECES = BYTES // 16  # of a record
TILE_SUMS = 4 * ROWS * NARROW  # bytes


class Schedule(NamedTuple):
    """What changes time and not bits."""

    rows: int = 2  # row tiles of an item
    records: int = 2  # of a stage, for each row tile
    ring: int = 2  # stages
    blocks: int = 2  # of a multiprocessor


PRODUCT = Schedule()


@cache
def make(
    depth: int, gate_up: bool, direct: bool = False, schedule=PRODUCT, raw: bool = False
) -> Program:
    """A row is `depth` records. gate_up: rows of x are those of tokens; else, of pairs.

    direct: `plan` is the router's choice, a pair is a tile.
    raw: float32 sums instead of activations, for tests of the order of summation.
    """
    warps = slices(depth)
    own = depth // warps  # records of a warp and row tile
    each = schedule.records if own % schedule.records == 0 else 1
    steps = own // each
    rows, threads = schedule.rows, WARP * warps
    ring = min(schedule.ring, steps + 1)
    ahead, last_slot = ring - 1, ring - 1
    part = each * BYTES  # bytes of a row tile in a stage
    stage = rows * part
    full, tail = each * PIECES // WARP, each * PIECES % WARP
    tile_words = depth * WORDS
    columns = depth * COLUMNS
    sums, sums_bytes = warps * ring * stage, warps * rows * TILE_SUMS  # behind the rings, two
    count2, count4, count8, operands = rows * 2, rows * 4, rows * 8, each * 8
    entries = rows * 64  # gate and up of a row and a pair
    rounds = -(-entries // threads)
    gate = gate_up and not raw
    tile_width = ROWS // 2 if gate else ROWS
    element = bf16 if gate else float32
    tiles_of, entry_of, pair_of = reader(direct)
    kind = "gate_up" if gate_up else "down"
    kind += ("_direct" if direct else "") + ("_raw" if raw else "")
    assert 0 < rows * tail <= WARP

    @cuda.jit(device=True, inline="always")
    def fetch(slot, slot_tail, source, source_tail, lane):
        for r in range(rows):
            for f in range(full):
                ptx.copy16(slot + (r * part + f * 512), source, r * tile_words + f * 128)
        if lane < rows * tail:
            ptx.copy16(slot_tail, source_tail, 0)

    @cuda.jit(device=True, inline="always")
    def row_of(pair, picks):
        """Where the row of a pair begins: its token's, or its own."""
        if gate_up:
            pair = int32(ptx.divide(pair, picks))
        return pair * columns

    @kernel(
        threads=threads,
        name=f"moe_{kind}_{columns}_" + "_".join(map(str, schedule)),
        min_blocks=schedule.blocks,
        shared_bytes=sums + 2 * sums_bytes,
        registers=128,
        opcodes=("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "HFMA2"),
        pdl=True,
    )
    @cuda.jit
    def sliced_kernel(
        x: read(bf16),
        records: read(uint32),
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
        base = memory + warp * (ring * stage)
        put, got_scales = base + lane * 16, base + column * 8 + 4 * SCALES
        tail_tile, tail_word = lane // tail, full * 128 + lane % tail * 4
        put_tail = base + tail_tile * part + tail_word * 4
        to_tail = tail_tile * tile_words + tail_word - lane * 4
        stream = ptx.at(records, first_tile * tile_words + warp * own * WORDS + lane * 4)
        slice_in = ptx.at(x, warp * own * COLUMNS + quad * 8)
        expert_words = tiles * tile_words
        tile, group = divided(cuda.blockIdx.x, groups)
        over, group_over = divided(cuda.gridDim.x, groups)
        ptx.wait_for_previous()
        ptx.launch_next()
        entry = entry_of(plan, tile, experts)  # beside the number of tiles, not behind it
        tile_count = tiles_of(plan, count)
        last_tile = int32(tile_count - 1)
        if tile < tile_count:
            later_entry = int32(0)
            next_tile, next_group = int32(tile + over), int32(group + group_over)
            if next_group >= groups:
                next_tile, next_group = int32(next_tile + 1), int32(next_group - groups)
            next_entry = entry_of(plan, min(next_tile, last_tile), experts)
            place = (entry & 0xFFFF) * expert_words + group * (rows * tile_words)
            source = ptx.at(stream, place)
            for s in range(ahead):
                fetch(put + s * stage, put_tail + s * stage, source, ptx.at(source, to_tail), lane)
                ptx.copy_commit()
                source = ptx.at(source, each * WORDS)
            source_tail = ptx.at(source, to_tail)
            pair = pair_of(pairs, tile, entry, column)
            row = ptx.at(slice_in, row_of(pair, picks))
            b = cuda.local.array(operands, uint32)
            for n in range(each * 2):
                b[4 * n], b[4 * n + 1], b[4 * n + 2], b[4 * n + 3] = ptx.ldg4(row, 32 * n)
            taken, filling, buffer = int32(0), int32(ahead * stage), int32(0)
            total = cuda.local.array(count4, float32)
            words = cuda.local.array(count4, uint32)
            group_scales = cuda.local.array(count2, uint32)
            factors = cuda.local.array(count2, uint32)
            addends = cuda.local.array(count2, uint32)
            a = cuda.local.array(count8, uint32)
            while tile < tile_count:
                more = next_tile < tile_count
                later_tile, later_group = int32(next_tile + over), int32(next_group + group_over)
                if later_group >= groups:
                    later_tile, later_group = int32(later_tile + 1), int32(later_group - groups)
                next_pair = pair_of(pairs, min(next_tile, last_tile), next_entry, column)
                for n in range(count4):
                    total[n] = float32(0)
                step = int32(0)
                while step < step_count:
                    ptx.copy_wait(ring - 2)
                    cuda.syncwarp()
                    if step == steps - ahead:
                        # for the item after next: in time, and waited for by nobody
                        later_entry = entry_of(plan, min(later_tile, last_tile), experts)
                        place = (next_entry & 0xFFFF) * expert_words
                        source = ptx.at(stream, place + next_group * (rows * tile_words))
                        source_tail = ptx.at(source, to_tail)
                    if step < steps - ahead or more:
                        fetch(put + filling, put_tail + filling, source, source_tail, lane)
                    ptx.copy_commit()
                    source = ptx.at(source, each * WORDS)
                    source_tail = ptx.at(source_tail, each * WORDS)
                    filling = int32(filling + stage if filling != last_slot * stage else 0)
                    row = ptx.at(row, each * COLUMNS)
                    if step == step_count - 1:
                        row = ptx.at(slice_in, row_of(next_pair, picks))
                    weights, weight_scales = put + taken, got_scales + taken
                    taken = int32(taken + stage if taken != last_slot * stage else 0)
                    for k in range(each):
                        for r in range(rows):
                            at, w = r * part + k * BYTES, 4 * r
                            words[w], words[w + 1], words[w + 2], words[w + 3] = ptx.lds4(
                                weights + at
                            )
                            g = 2 * r
                            group_scales[g], group_scales[g + 1] = ptx.lds2(weight_scales + at)
                        for h in range(2):
                            n = 8 * k + 4 * h
                            for r in range(rows):
                                w, g = 4 * r + 2 * h, 2 * r
                                scales(group_scales[g + h], factors, addends, g)
                                dequantize(words[w], factors, addends, g, a, 8 * r)
                                dequantize(words[w + 1], factors, addends, g, a, 8 * r + 4)
                            for r in range(rows):
                                multiply(total, 4 * r, a, 8 * r, b, n)
                                multiply(total, 4 * r, a, 8 * r + 4, b, n + 2)
                            b[n], b[n + 1], b[n + 2], b[n + 3] = ptx.ldg4(row, 64 * k + 32 * h)
                    step = int32(step + 1)
                meeting = memory + sums + buffer * sums_bytes
                buffer = buffer ^ 1
                for r in range(rows):
                    to, c = meeting + (warp * rows + r) * TILE_SUMS + lane * 16, 4 * r
                    ptx.sts4_f(to, total[c], total[c + 1], total[c + 2], total[c + 3])
                cuda.syncthreads()
                for n in range(rounds):
                    i = int32(thread + n * threads)
                    if i < entries:
                        r, holder, side = i >> 6, (i & 63) >> 1, i & 1
                        token = (holder & 3) * 2 + side
                        owner = int32(ptx.shfl_idx(pair, token * 4))
                        at = meeting + r * TILE_SUMS + holder * 16 + side * 4
                        above, below = ptx.lds1_f(at), ptx.lds1_f(at + 8)
                        for s in range(1, warps):
                            above = above + ptx.lds1_f(at + s * rows * TILE_SUMS)
                            below = below + ptx.lds1_f(at + s * rows * TILE_SUMS + 8)
                        above, below = above * UNSCALED, below * UNSCALED
                        if token < entry >> 16:
                            to = owner * own_tiles * tile_width
                            to = to + (group * rows + r) * tile_width + (holder >> 2)
                            if gate:
                                out[to] = ptx.round_bf16(gated(above, below))
                            else:
                                out[to] = above
                                out[to + 8] = below
                tile, group, entry, pair = next_tile, next_group, next_entry, next_pair
                next_tile, next_group, next_entry = later_tile, later_group, later_entry
            ptx.copy_wait(0)

    return Program(sliced_kernel, rows, 1, schedule.blocks, steps)
