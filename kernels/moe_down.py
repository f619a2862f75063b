"""Few tokens a tile, short rows: a warp makes row tiles of down by itself, from an expert's I.

The activations of up to 8 pairs stay in the warp's registers, the records of row tiles come through
its ring. The ring is filled before the activations are there: weights and plan depend on nothing
that the kernel ahead writes. A row's sum has two slices, independent chains that are added.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import kernel
from ddtree_numba.kernels.moe_arithmetic import UNSCALED, dequantize, multiply, scales
from ddtree_numba.kernels.moe_records import BYTES, COLUMNS, ROWS, SCALES, WORDS, slices
from ddtree_numba.kernels.moe_tiles import WARP, Program, reader
from ddtree_numba.kernels.numerics import divided

MOST_DEPTH = 8  # records of a row whose activations a warp holds in registers


class Schedule(NamedTuple):
    """What changes time and not bits."""

    warps: int = 4
    rows: int = 4  # row tiles of an item
    ring: int = 4  # row tiles
    blocks: int = 4  # of a multiprocessor


@cache
def schedule_of(depth: int, tiles: int, direct: bool) -> Schedule:
    """Four warps fit beside two blocks of gate_up, and so fetch their weights meanwhile."""
    if depth > 4:
        return Schedule(ring=3, blocks=2)
    if direct:
        return Schedule(warps=8, ring=3, blocks=2)
    return Schedule(rows=4 if tiles % 8 else 8)


@cache
def make(depth: int, direct: bool, schedule: Schedule) -> Program:
    """A row is `depth` records. direct: `plan` is the router's choice, a pair is a tile."""
    warps, rows, ring = schedule.warps, schedule.rows, schedule.ring
    chains = slices(depth)
    own = depth // chains  # records of a chain
    stage, tile_words = depth * BYTES, depth * WORDS
    pieces = stage // 16
    full, tail = pieces // WARP, pieces % WARP
    ahead, last_slot = ring - 1, ring - 1
    columns, operands = depth * COLUMNS, depth * 8
    threads = WARP * warps
    tiles_of, entry_of, pair_of = reader(direct)
    assert depth <= MOST_DEPTH and chains <= 2 and ahead <= rows

    @cuda.jit(device=True, inline="always")
    def fetch(slot, source, lane):
        for f in range(full):
            ptx.copy16(slot + f * 512, source, f * 128)
        if tail > 0 and lane < tail:
            ptx.copy16(slot + full * 512, source, full * 128)

    @kernel(
        threads=threads,
        name=f"moe_down{'_direct' if direct else ''}_{columns}_" + "_".join(map(str, schedule)),
        min_blocks=schedule.blocks,
        shared_bytes=warps * ring * stage,
        registers=192,
        opcodes=("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "HFMA2"),
        pdl=True,
    )
    @cuda.jit
    def down_kernel(
        hidden: read(bf16),
        records: read(uint32),
        plan: read(int32),
        pairs: read(int32),
        out: write(float32),
        count: int32,
        picks: int32,
        experts: int32,
        tiles: int32,
        first_tile: int32,
        own_tiles: int32,
        groups: int32,
        row_count: int32,
    ):
        memory = ptx.shared_address(cuda.shared.array(0, uint32, alignment=16))
        thread = int32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        column, quad = lane >> 2, lane & 3
        base = memory + warp * (ring * stage)
        put, got_scales = base + lane * 16, base + column * 8 + 4 * SCALES
        stream = ptx.at(records, first_tile * tile_words + lane * 4)
        # Neighbouring blocks take neighbouring items: a multiprocessor has a share of each.
        item = warp * int32(cuda.gridDim.x) + int32(cuda.blockIdx.x)
        stride = int32(cuda.gridDim.x) * warps
        tile, group = divided(item, groups)
        over, group_over = divided(stride, groups)
        expert_words = tiles * tile_words
        tile_count = tiles_of(plan, count)
        last_tile = int32(tile_count - 1)
        here = tile < tile_count
        next_tile, next_group = int32(tile + over), int32(group + group_over)
        if next_group >= groups:
            next_tile, next_group = int32(next_tile + 1), int32(next_group - groups)
        entry = next_entry = later_entry = pair = int32(0)
        source = stream
        if here:
            entry = entry_of(plan, tile, experts)
            next_entry = entry_of(plan, min(next_tile, last_tile), experts)
            pair = pair_of(pairs, tile, entry, column)
            place = (entry & 0xFFFF) * expert_words + group * (rows * tile_words)
            source = ptx.at(stream, place)
            for s in range(ahead):
                fetch(put + s * stage, source, lane)
                ptx.copy_commit()
                source = ptx.at(source, tile_words)
        ptx.wait_for_previous()
        ptx.launch_next()
        if here:
            taken, filling = int32(0), int32(ahead * stage)
            b = cuda.local.array(operands, uint32)
            words = cuda.local.array(4, uint32)
            group_scales = cuda.local.array(2, uint32)
            factors = cuda.local.array(2, uint32)
            addends = cuda.local.array(2, uint32)
            a = cuda.local.array(8, uint32)
            total = cuda.local.array(8, float32)
            while tile < tile_count:
                row = ptx.at(hidden, pair * columns + quad * 8)
                for n in range(2 * depth):
                    b[4 * n], b[4 * n + 1], b[4 * n + 2], b[4 * n + 3] = ptx.ldg4(row, 32 * n)
                more = next_tile < tile_count
                later_tile, later_group = int32(next_tile + over), int32(next_group + group_over)
                if later_group >= groups:
                    later_tile, later_group = int32(later_tile + 1), int32(later_group - groups)
                next_pair = pair_of(pairs, min(next_tile, last_tile), next_entry, column)
                width = own_tiles * ROWS
                left = int32(ptx.shfl_idx(pair, quad * 8))
                right = int32(ptx.shfl_idx(pair, quad * 8 + 4))
                to_left = ptx.at(out, left * width + group * (rows * ROWS) + column)
                to_right = ptx.at(out, right * width + group * (rows * ROWS) + column)
                n = int32(0)
                while n < row_count:
                    ptx.copy_wait(ring - 2)
                    cuda.syncwarp()
                    if n == rows - ahead:
                        # for the item after next: in time, and waited for by nobody
                        later_entry = entry_of(plan, min(later_tile, last_tile), experts)
                        place = (next_entry & 0xFFFF) * expert_words
                        source = ptx.at(stream, place + next_group * (rows * tile_words))
                    if n < rows - ahead or more:
                        fetch(put + filling, source, lane)
                    ptx.copy_commit()
                    source = ptx.at(source, tile_words)
                    filling = int32(filling + stage if filling != last_slot * stage else 0)
                    weights, weight_scales = put + taken, got_scales + taken
                    taken = int32(taken + stage if taken != last_slot * stage else 0)
                    for i in range(8):
                        total[i] = float32(0)
                    for k in range(own):
                        for chain in range(chains):
                            at, j = (chain * own + k) * BYTES, (chain * own + k) * 8
                            words[0], words[1], words[2], words[3] = ptx.lds4(weights + at)
                            group_scales[0], group_scales[1] = ptx.lds2(weight_scales + at)
                            for h in range(2):
                                scales(group_scales[h], factors, addends, 0)
                                dequantize(words[2 * h], factors, addends, 0, a, 0)
                                dequantize(words[2 * h + 1], factors, addends, 0, a, 4)
                                multiply(total, 4 * chain, a, 0, b, j + 4 * h)
                                multiply(total, 4 * chain, a, 4, b, j + 4 * h + 2)
                    for i in range(4):
                        if chains > 1:
                            total[i] = total[i] + total[4 + i]
                        total[i] = total[i] * UNSCALED
                    if 2 * quad < entry >> 16:
                        to_left[0] = total[0]
                        to_left[8] = total[2]
                    if 2 * quad + 1 < entry >> 16:
                        to_right[0] = total[1]
                        to_right[8] = total[3]
                    to_left, to_right = ptx.at(to_left, ROWS), ptx.at(to_right, ROWS)
                    n = int32(n + 1)
                tile, group, entry, pair = next_tile, next_group, next_entry, next_pair
                next_tile, next_group, next_entry = later_tile, later_group, later_entry
            ptx.copy_wait(0)

    return Program(down_kernel, rows, warps, schedule.blocks, rows)
