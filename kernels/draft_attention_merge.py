"""Second pass of `draft_attention.py`: the splits' sums, added in position order.

The first pass leaves, of every split, tile of 16 rows and 8 columns, four numbers a lane: two
columns of rows g and g + 8, g = lane / 4. A block takes half of the lanes, so eight rows, with all
loads under way together. Each of its half-warps adds up a run of splits, then the runs are added in
order; meanwhile each warp finds the factors of one row.
"""

from functools import cache

from numba import cuda, float32, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.draft_attention_split import SPLITS, split_pages
from ddtree_numba.kernels.draft_attention_steps import LOWEST
from ddtree_numba.kernels.launch import Kernel, kernel

WARPS = 8  # rows of a block
RUNS = 2 * WARPS
LONGEST = -(-SPLITS // RUNS)  # run
LOADS = -(-SPLITS // 32)  # factors of a lane


@cache
def make_merge(width: int, tiles: int) -> Kernel:
    columns = width // 8
    factors_size, sums_size = SPLITS * WARPS, RUNS * 64
    values_size, marks_size = 4 * LONGEST, 2 * LOADS

    @kernel(
        threads=32 * WARPS,
        name=f"draft_attention_merge_{width}_{16 * tiles}",
        registers=96,
        opcodes=("LDG.E.128",),
        pdl=True,
    )
    @cuda.jit
    def draft_attention_merge_kernel(
        sums: read(float32),
        tops: read(float32),
        lengths: read(int32),
        block: int32,
        group_rows: int32,
        window: int32,
        splits: int32,
        out: write(bf16),
    ):
        half, column = cuda.blockIdx.x % 2, cuda.blockIdx.x // 2 % columns
        tile = cuda.blockIdx.x // 2 // columns
        head, request = cuda.blockIdx.y, cuda.blockIdx.z
        heads = cuda.gridDim.y
        thread = int32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        factors = cuda.shared.array(factors_size, float32)  # of a split's row
        totals = cuda.shared.array(WARPS, float32)
        shared = cuda.shared.array(sums_size, float32, alignment=16)
        first, count, each = split_pages(lengths[request], window, splits)
        count += 1  # the last one has the block's rows
        ptx.wait_for_previous()
        ptx.launch_next()

        at = int64(request * heads + head) * splits * tiles
        run = thread >> 4
        longest = (count + RUNS - 1) // RUNS
        begin = run * longest
        end = min(begin + longest, count)
        value = cuda.local.array(values_size, float32)
        for i in range(LONGEST):
            z = 4 * i
            value[z], value[z + 1] = float32(0), float32(0)
            value[z + 2], value[z + 3] = float32(0), float32(0)
            if begin + i < end:
                source = ((at + (begin + i) * tiles + tile) * columns + column) * 128
                value[z], value[z + 1], value[z + 2], value[z + 3] = ptx.ldg4_f(
                    sums, source + half * 64 + (thread & 15) * 4
                )
        row = 4 * half + (warp & 3) + (warp >> 2) * 8
        mark = cuda.local.array(marks_size, float32)
        top = LOWEST
        for i in range(LOADS):
            mark[2 * i], mark[2 * i + 1] = LOWEST, float32(0)
            if lane + 32 * i < count:
                source = ((at + tile * splits) * 16 + row * splits + lane + 32 * i) * 2
                mark[2 * i], mark[2 * i + 1] = tops[source], tops[source + 1]
        for i in range(LOADS):
            top = ptx.fmax(top, mark[2 * i])
        for bit in range(5):
            top = ptx.fmax(top, ptx.shfl_xor_f(top, 1 << bit))
        total = float32(0)
        for i in range(LOADS):
            factor = ptx.exp2(ptx.sub(mark[2 * i], top))
            total = ptx.fma(mark[2 * i + 1], factor, total)
            if lane + 32 * i < count:
                factors[(lane + 32 * i) * WARPS + warp] = factor
        for bit in range(5):
            total = ptx.add(total, ptx.shfl_xor_f(total, 1 << bit))
        if lane == 0:
            totals[warp] = total
        cuda.syncthreads()

        g = (thread & 15) >> 2
        a0, a1, a2, a3 = float32(0), float32(0), float32(0), float32(0)
        for i in range(LONGEST):
            if begin + i < end:
                z = 4 * i
                upper = factors[(begin + i) * WARPS + g]
                lower = factors[(begin + i) * WARPS + g + 4]
                a0, a1 = ptx.fma(value[z], upper, a0), ptx.fma(value[z + 1], upper, a1)
                a2, a3 = ptx.fma(value[z + 2], lower, a2), ptx.fma(value[z + 3], lower, a3)
        ptx.sts4_f(ptx.shared_address(shared) + thread * 16, a0, a1, a2, a3)
        cuda.syncthreads()
        if warp == 0:  # lane: two columns of one row
            a0, a1 = float32(0), float32(0)
            place, h = lane >> 1, lane & 1
            for i in range(RUNS):
                a0 = ptx.add(a0, shared[(16 * i + place) * 4 + 2 * h])
                a1 = ptx.add(a1, shared[(16 * i + place) * 4 + 2 * h + 1])
            m = 16 * tile + 4 * half + (place >> 2) + 8 * h
            if m < block * group_rows:
                i = m // group_rows
                m += (i * heads + head - i) * group_rows  # row of [block, heads * group_rows]
                at = (int64(request) * block * heads * group_rows + m) * width
                total = totals[(place >> 2) + 4 * h]
                pair = ptx.pack_bf16(ptx.div(a1, total), ptx.div(a0, total))
                ptx.stg1(out, at + 8 * column + 2 * (place & 3), pair)

    return draft_attention_merge_kernel
