"""Sums of the splits' partials, in an order that a node's position alone decides.

Warp w adds splits w, w + 8, ... in order; then the eight warps' sums are added in order. A block
has one unit and sixteen columns of the result; all loads of a thread are under way together.
"""

from functools import cache

from numba import cuda, float32, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.attention_splits import split_of
from ddtree_numba.kernels.attention_tiles import LOWEST
from ddtree_numba.kernels.launch import Kernel, kernel

WARPS = 8
THREADS = 32 * WARPS
BATCH = 8  # partials that a thread has under way
WORDS = 4 * BATCH
MOST = 512  # splits of a node
ENTRIES = 8 * MOST


@cache
def make(latent: int) -> Kernel:
    tiles = latent // 16

    @kernel(
        threads=THREADS,
        name=f"attention_merge_{latent}",
        registers=80,
        min_blocks=3,
        opcodes=("LDG.E.128",),
        pdl=True,
    )
    @cuda.jit
    def merge_kernel(
        tops: read(float32),
        partial: read(float32),
        lasts: read(int32),
        out: write(bf16),
        nodes: int32,
        heads: int32,
        parts: int32,
        splits: int32,
    ):
        weight = cuda.shared.array(ENTRIES, float32)
        tops_of = cuda.shared.array((WARPS, 8), float32)
        totals_of = cuda.shared.array((WARPS, 8), float32)
        sums_of = cuda.shared.array((WARPS, 4, 32), float32)
        v = cuda.local.array(WORDS, float32)
        a = cuda.local.array(4, float32)
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        g, t = lane >> 2, lane & 3
        tile, unit, r = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        units = nodes * parts
        node = unit // parts
        last = lasts[r * nodes + node]  # of the plan, older than the kernel before
        count = 0
        if last >= 0:
            count = split_of(last) + 1
        ptx.wait_for_previous()
        ptx.launch_next()
        apart = units * tiles * 128  # floats from a split to the next
        source = (r * splits * units + unit) * tiles * 128 + tile * 128 + lane * 4
        for i in range(BATCH):
            s = warp + WARPS * i
            if s < count:
                v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3] = ptx.ldg4_f(
                    partial, source + s * apart
                )
        # weights: eight threads have a split's columns
        column, first = tid & 7, tid >> 3
        entry = ((r * splits + first) * units + unit) * 8 + column
        top = LOWEST
        s = first
        while s < count:
            mine = tops[2 * (entry + (s - first) * units * 8)]
            weight[8 * s + column] = mine
            top = ptx.fmax(top, mine)
            s += THREADS // 8
        top = ptx.fmax(top, ptx.shfl_xor_f(top, 8))
        top = ptx.fmax(top, ptx.shfl_xor_f(top, 16))
        if lane < 8:
            tops_of[warp, column] = top
        cuda.syncthreads()
        for w in range(WARPS):
            top = ptx.fmax(top, tops_of[w, column])
        total = float32(0)
        s = first
        while s < count:
            mine = ptx.exp2(ptx.sub(weight[8 * s + column], top))
            weight[8 * s + column] = mine
            total = ptx.fma(tops[2 * (entry + (s - first) * units * 8) + 1], mine, total)
            s += THREADS // 8
        total = ptx.add(total, ptx.shfl_xor_f(total, 8))
        total = ptx.add(total, ptx.shfl_xor_f(total, 16))
        if lane < 8:
            totals_of[warp, column] = total
        cuda.syncthreads()
        for i in range(4):
            a[i] = float32(0)
        base = warp
        while base < count:
            for i in range(BATCH):
                s = base + WARPS * i
                if s < count:
                    w0, w1 = weight[8 * s + 2 * t], weight[8 * s + 2 * t + 1]
                    a[0] = ptx.fma(v[4 * i], w0, a[0])
                    a[1] = ptx.fma(v[4 * i + 1], w1, a[1])
                    a[2] = ptx.fma(v[4 * i + 2], w0, a[2])
                    a[3] = ptx.fma(v[4 * i + 3], w1, a[3])
                s += WARPS * BATCH
                if s < count:
                    v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3] = ptx.ldg4_f(
                        partial, source + s * apart
                    )
            base += WARPS * BATCH
        for i in range(4):
            sums_of[warp, i, lane] = a[i]
        cuda.syncthreads()
        if warp == 0:
            for w in range(1, WARPS):
                for i in range(4):
                    a[i] = ptx.add(a[i], sums_of[w, i, lane])
            head = (unit - node * parts) * 8 + 2 * t
            at = ((r * nodes + node) * heads + head) * tiles * 16 + tile * 16 + g
            for i in range(2):
                total = totals_of[0, 2 * t + i]
                for w in range(1, WARPS):
                    total = ptx.add(total, totals_of[w, 2 * t + i])
                if head + i < heads:
                    low, high = float32(0), float32(0)
                    if count > 0:
                        low, high = ptx.div(a[i], total), ptx.div(a[2 + i], total)
                    out[at + i * tiles * 16] = ptx.round_bf16(low)
                    out[at + i * tiles * 16 + 8] = ptx.round_bf16(high)

    return merge_kernel
