"""Second pass of `draft_attention.py`: the splits' sums, added in position order.

The first pass leaves, of every split, tile of 16 rows and 8 columns, four numbers a lane: two
columns of rows g and g + 8, g = lane / 4. A block takes half of the lanes, so eight rows. All loads
are under way together: each half-warp holds a run of splits, each of the first warps the maxima of
one row. Runs are added up, then the sums of runs in order.
"""

from functools import cache

from numba import cuda, float32, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.draft_attention_split import SPLITS, split_pages
from ddtree_numba.kernels.draft_attention_steps import LOWEST
from ddtree_numba.kernels.launch import Kernel, kernel

WARPS = 16
RUN = -(-SPLITS // (2 * WARPS))  # splits of a half-warp
LOADS = -(-SPLITS // 32)  # maxima of a row for each lane
ROWS = 8  # of a block


@cache
def make_merge(width: int, tiles: int) -> Kernel:
    columns = width // 8
    stride = tiles * columns * 128  # from a split's sums to the next one's
    factors_size, sums_size = 2 * WARPS * RUN * ROWS, WARPS * 64
    values_size, marks_size = 4 * RUN, 2 * LOADS

    @kernel(
        threads=32 * WARPS,
        min_blocks=2,
        name=f"draft_attention_merge_{width}_{16 * tiles}",
        registers=64,
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
        lane, warp, place = thread & 31, thread >> 5, thread & 15
        factors = cuda.shared.array(factors_size, float32)  # [split, row]
        totals = cuda.shared.array(ROWS, float32)
        shared = cuda.shared.array(sums_size, float32, alignment=16)  # [warp, place, 4]
        staged = ptx.shared_address(shared)
        first, count, each = split_pages(lengths[request], window, splits)
        count += 1  # the last one has the block's rows
        begin = (thread >> 4) * RUN
        at = int64(request * heads + head) * splits * tiles
        source = (at * columns + tile * columns + column) * 128 + half * 64 + place * 4
        source += begin * stride
        row = 4 * half + (warp & 3) + (warp >> 2) * 8  # of a warp below ROWS
        marks = ((at + tile * splits) * 16 + row * splits + lane) * 2
        value = cuda.local.array(values_size, float32)
        mark = cuda.local.array(marks_size, float32)
        for i in range(values_size):
            value[i] = float32(0)
        for i in range(LOADS):
            mark[2 * i], mark[2 * i + 1] = LOWEST, float32(0)
        ptx.wait_for_previous()
        ptx.launch_next()

        if warp < ROWS:
            for i in range(LOADS):
                if lane + 32 * i < count:
                    mark[2 * i] = tops[marks + 64 * i]
                    mark[2 * i + 1] = tops[marks + 64 * i + 1]
        for i in range(RUN):
            if begin + i < count:
                z = 4 * i
                value[z], value[z + 1], value[z + 2], value[z + 3] = ptx.ldg4_f(
                    sums, source + i * stride
                )
        if warp < ROWS:
            top, total = LOWEST, float32(0)
            for i in range(LOADS):
                top = ptx.fmax(top, mark[2 * i])
            for bit in range(5):
                top = ptx.fmax(top, ptx.shfl_xor_f(top, 1 << bit))
            for i in range(LOADS):
                factor = ptx.exp2(ptx.sub(mark[2 * i], top))
                total = ptx.fma(mark[2 * i + 1], factor, total)
                factors[(lane + 32 * i) * ROWS + warp] = factor
            for bit in range(5):
                total = ptx.add(total, ptx.shfl_xor_f(total, 1 << bit))
            if lane == 0:
                totals[warp] = total
        cuda.syncthreads()

        a0, a1, a2, a3 = float32(0), float32(0), float32(0), float32(0)
        for i in range(RUN):
            z, at = 4 * i, (begin + i) * ROWS + (place >> 2)
            upper, lower = factors[at], factors[at + 4]
            a0, a1 = ptx.fma(value[z], upper, a0), ptx.fma(value[z + 1], upper, a1)
            a2, a3 = ptx.fma(value[z + 2], lower, a2), ptx.fma(value[z + 3], lower, a3)
        a0, a1 = ptx.add(a0, ptx.shfl_xor_f(a0, 16)), ptx.add(a1, ptx.shfl_xor_f(a1, 16))
        a2, a3 = ptx.add(a2, ptx.shfl_xor_f(a2, 16)), ptx.add(a3, ptx.shfl_xor_f(a3, 16))
        if lane < 16:
            ptx.sts4_f(staged + (warp * 16 + place) * 16, a0, a1, a2, a3)
        cuda.syncthreads()
        if warp == 0:  # lane: two columns of one row
            place, h = lane >> 1, lane & 1
            a0, a1 = float32(0), float32(0)
            for i in range(WARPS):
                b0, b1 = ptx.lds2_f(staged + ((i * 16 + place) * 2 + h) * 8)
                a0, a1 = ptx.add(a0, b0), ptx.add(a1, b1)
            m = 16 * tile + 4 * half + (place >> 2) + 8 * h
            if m < block * group_rows:
                i = m // group_rows
                m += (i * heads + head - i) * group_rows  # row of [block, heads * group_rows]
                at = (int64(request) * block * heads * group_rows + m) * width
                total = totals[(place >> 2) + 4 * h]
                pair = ptx.pack_bf16(ptx.div(a1, total), ptx.div(a0, total))
                ptx.stg1(out, at + 8 * column + 2 * (place & 3), pair)

    return draft_attention_merge_kernel
