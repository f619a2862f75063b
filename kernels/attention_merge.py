"""Sums of the splits' partials, in an order that a node's position alone decides.

Warp w adds splits w, w + 8, ... in order; then the eight warps' sums are added in order. A block
has one unit and `span` tiles of sixteen columns, which changes no bit: many for many units, that
their blocks run at once, one for few, that they are many blocks. A thread's loads are under way
together.
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
LOADS = 8  # partials that a thread has under way
MOST = 512  # splits of a node
ENTRIES = 8 * MOST
EACH = MOST // (THREADS // 8)  # splits whose weights a thread makes
SPAN, FEW = 4, 6  # tiles of a block; units that take blocks of one tile


@cache
def make(latent: int, span: int) -> Kernel:
    tiles = latent // 16
    batch = LOADS // span  # splits of a warp under way
    words, sums, entries = 4 * LOADS, 4 * span, 2 * EACH
    assert tiles % span == 0

    @cuda.jit(device=True, inline="always")
    def load(v, k, partial, at):
        """The span's columns of one split."""
        for j in range(span):
            z = 4 * (k * span + j)
            v[z], v[z + 1], v[z + 2], v[z + 3] = ptx.ldg4_f(partial, at + j * 128)

    @kernel(
        threads=THREADS,
        name=f"attention_merge_{latent}_{span}",
        registers=128,
        min_blocks=2,
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
        sums_of = cuda.shared.array((WARPS, sums, 32), float32)
        v = cuda.local.array(words, float32)
        a = cuda.local.array(sums, float32)
        own = cuda.local.array(entries, float32)
        tid = int32(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        g, t = lane >> 2, lane & 3
        tile, unit, r = int32(cuda.blockIdx.x * span), int32(cuda.blockIdx.y), cuda.blockIdx.z
        units = nodes * parts
        node = int32(ptx.divide(unit, parts))
        last = lasts[r * nodes + node]  # of the plan, which is older than the partials
        count = int32(0)
        if last >= 0:
            count = int32(split_of(last) + 1)
        ptx.launch_next()
        ptx.wait_for_previous()
        # weights: eight threads have a split's columns
        column, first = tid & 7, tid >> 3
        entry = ((r * splits + first) * units + unit) * 8 + column
        for i in range(EACH):
            own[2 * i], own[2 * i + 1] = LOWEST, float32(0)
            if first + 32 * i < count:
                at = 2 * (entry + i * 32 * units * 8)
                own[2 * i], own[2 * i + 1] = ptx.ldg2_f(tops, at)
        apart = units * tiles * 128  # floats from a split to the next
        source = (r * splits * units + unit) * tiles * 128 + tile * 128 + lane * 4
        for k in range(batch):
            s = warp + WARPS * k
            if s < count:
                load(v, k, partial, source + s * apart)
        top = LOWEST
        for i in range(EACH):
            top = ptx.fmax(top, own[2 * i])
        top = ptx.fmax(top, ptx.shfl_xor_f(top, 8))
        top = ptx.fmax(top, ptx.shfl_xor_f(top, 16))
        if lane < 8:
            tops_of[warp, column] = top
        cuda.syncthreads()
        for w in range(WARPS):
            top = ptx.fmax(top, tops_of[w, column])
        total = float32(0)
        for i in range(EACH):
            s = first + 32 * i
            if s < count:
                mine = ptx.exp2(ptx.sub(own[2 * i], top))
                weight[8 * s + column] = mine
                total = ptx.fma(own[2 * i + 1], mine, total)
        total = ptx.add(total, ptx.shfl_xor_f(total, 8))
        total = ptx.add(total, ptx.shfl_xor_f(total, 16))
        if lane < 8:
            totals_of[warp, column] = total
        cuda.syncthreads()
        for i in range(sums):
            a[i] = float32(0)
        base = warp
        while base < count:
            for k in range(batch):
                s = int32(base + WARPS * k)
                if s < count:
                    w0, w1 = weight[8 * s + 2 * t], weight[8 * s + 2 * t + 1]
                    for j in range(span):
                        z, y = 4 * (k * span + j), 4 * j
                        a[y] = ptx.fma(v[z], w0, a[y])
                        a[y + 1] = ptx.fma(v[z + 1], w1, a[y + 1])
                        a[y + 2] = ptx.fma(v[z + 2], w0, a[y + 2])
                        a[y + 3] = ptx.fma(v[z + 3], w1, a[y + 3])
                s = int32(s + WARPS * batch)
                if s < count:
                    load(v, k, partial, source + s * apart)
            base = int32(base + WARPS * batch)
        for i in range(sums):
            sums_of[warp, i, lane] = a[i]
        cuda.syncthreads()
        if warp < span:  # a warp a tile
            for i in range(4):
                a[i] = sums_of[0, 4 * warp + i, lane]
            for w in range(1, WARPS):
                for i in range(4):
                    a[i] = ptx.add(a[i], sums_of[w, 4 * warp + i, lane])
            head = (unit - node * parts) * 8 + 2 * t
            at = ((r * nodes + node) * heads + head) * tiles * 16 + (tile + warp) * 16 + g
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


def tiles_of_block(latent: int, units: int) -> int:
    """Tiles of a block of the merge, where so many units are merged."""
    return SPAN if units > FEW and latent // 16 % SPAN == 0 else 1
