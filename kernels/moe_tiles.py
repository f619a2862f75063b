"""Which tokens share an expert: tiles of at most `width` pairs (token, pick) of one expert.

plan: int32, the number of tiles, then expert | pairs << 16 for each, in the order of experts.
pairs: int32[tiles * width], the tile's pairs token * k + pick; what lies behind them is not read.

Pairs come in the order of arrival at an integer counter. No bit of a result depends on it: a pair
is a column of an mma, and knows nothing of its neighbours. A pick outside of 0 .. E - 1 is padding.

Up to 32 pairs need no launch: each block of the kernels that follow groups them by itself.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.launch import Kernel, kernel

WARP = 32
MOST_EXPERTS = 1024  # a thread each
FEW = 32  # pairs that a warp groups by itself
NARROW, WIDE = 8, 32  # columns of a tile: one mma, or enough to share what a weight costs


class Program(NamedTuple):
    """A kernel over items: a tile of pairs and some row tiles of its expert.

    Its parameters: x, records, plan, pairs, out, then the numbers of pairs, picks of a token,
    experts, row tiles of an expert; the first row tile to make, how many, in how many groups;
    steps. out has the columns of those row tiles alone.
    """

    kernel: Kernel
    each: int  # row tiles of an item
    workers: int  # items that a block has under way
    blocks: int  # of a multiprocessor
    steps: int  # of the inner loop; a constant would be unrolled


def most_tiles(pairs: int, experts: int, width: int) -> int:
    return min(pairs, experts + pairs // width)


@cuda.jit(device=True, inline="always")
def divided(a, b):
    """Quotient and rest."""
    quotient = int32(ptx.divide(a, b))
    return quotient, int32(a - quotient * b)


@cache
def make(width: int, threads: int = 512) -> Kernel:
    """threads: as many as experts, or more."""
    warps = threads // WARP

    @kernel(threads=threads, name=f"moe_group_{width}_{threads}", registers=32, pdl=True)
    @cuda.jit
    def group_kernel(
        picked: read(int32), plan: write(int32), pairs: write(int32), count: int32, experts: int32
    ):
        thread, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        places = cuda.shared.array(threads, int32)  # how many pairs an expert has, then where
        sums = cuda.shared.array(warps, int32)
        places[thread] = 0
        cuda.syncthreads()
        ptx.wait_for_previous()
        ptx.launch_next()
        i = thread
        while i < count:
            expert = picked[i]
            if expert >= 0 and expert < experts:
                cuda.atomic.add(places, expert, 1)
            i += threads
        cuda.syncthreads()
        own = places[thread]
        tiles = (own + width - 1) // width
        before = tiles
        for n in range(5):
            other = int32(ptx.shfl_up(before, 1 << n))
            if lane >= 1 << n:
                before = int32(before + other)
        if lane == 31:
            sums[warp] = before
        cuda.syncthreads()
        tile, total = int32(before - tiles), int32(0)
        for n in range(warps):
            if n < warp:
                tile = int32(tile + sums[n])
            total = int32(total + sums[n])
        places[thread] = tile * width
        if thread == 0:
            plan[0] = total
        left = int32(own)
        while left > 0:
            plan[1 + tile] = thread | min(left, width) << 16
            tile = int32(tile + 1)
            left = int32(left - width)
        cuda.syncthreads()
        i = thread
        while i < count:
            expert = picked[i]
            if expert >= 0 and expert < experts:
                pairs[cuda.atomic.add(places, expert, 1)] = i
            i += threads

    return group_kernel


def grouping(width: int):
    """A device function: the lanes of one warp group up to 32 pairs into shared plan and pairs."""
    shift = width.bit_length() - 1
    assert 1 << shift == width

    @cuda.jit(device=True, inline="always")
    def group_few(picked, count, experts, plan, pairs):
        lane = cuda.threadIdx.x & 31
        below = (uint32(1) << lane) - 1
        expert = int32(-1)
        if lane < count:
            expert = int32(picked[lane])
        real = expert >= 0 and expert < experts
        key = expert if real else experts + lane
        same = ptx.popc(ptx.match_any(key) & below) >> shift  # full tiles of the expert before
        mates = ptx.match_any(key | same << 16)
        place = ptx.popc(mates & below)
        first = real and place == 0
        leaders = ptx.match_any(1 if first else 0)
        if not first:
            leaders = ~leaders
        leader = 31 - ptx.clz(mates & (~mates + 1))
        tile = ptx.popc(leaders & ((uint32(1) << leader) - 1))
        if real:
            pairs[tile * width + place] = lane
        if first:
            plan[1 + tile] = expert | ptx.popc(mates) << 16
        if lane == 0:
            plan[0] = ptx.popc(leaders)

    return group_few


def instances() -> list[Kernel]:
    return [make(width) for width in (NARROW, WIDE)]
