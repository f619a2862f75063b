"""Which tokens share an expert: tiles of at most `width` pairs (token, pick) of one expert.

plan: int32, the number of tiles, then expert | pairs << 16 for each. Experts whose first tile has
more groups of eight pairs come first: blocks that take tiles at a fixed stride get as much of each
size as others. Among those of a size, experts are in their order.
pairs: int32[tiles * width], the tile's pairs token * k + pick; what lies behind them is not read.

Pairs come in the order of arrival at an integer counter. No bit of a result depends on it: a pair
is a column of an mma, and knows nothing of its neighbours. A pick outside of 0 .. E - 1 is padding.

Every block counts all pairs, which costs less than placing them, and places those of its own
experts, a run of them.

A few pairs are not grouped: each is a tile of its own, and the router's choice serves as the plan.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.launch import Kernel, kernel

WARP = 32
MOST_EXPERTS = 1024
PLACED = 1024  # pairs, about, that a block places
MOST_BLOCKS = 8
DIRECT = 32  # pairs, at most, that are not grouped: four tokens seldom share an expert
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


def blocks(pairs: int) -> int:
    """That group so many pairs."""
    return min(max(pairs // PLACED, 1), MOST_BLOCKS)


def most_tiles(pairs: int, experts: int, width: int) -> int:
    return min(pairs, experts + pairs // width)


def reader(direct: bool):
    """Device functions: the number of tiles, a tile's expert and size, a column's pair."""

    @cuda.jit(device=True, inline="always")
    def tiles_of(plan, count):
        tiles = count
        if not direct:
            tiles = int32(plan[0])
        return tiles

    @cuda.jit(device=True, inline="always")
    def entry_of(plan, tile, experts):
        """expert | pairs << 16; padding has no pair, and any expert's weights are read for it."""
        if direct:
            entry = int32(plan[tile])
            entry = entry | 1 << 16 if entry >= 0 and entry < experts else 0
        else:
            entry = plan[1 + tile]
        return int32(entry)

    @cuda.jit(device=True, inline="always")
    def pair_of(pairs, tile, entry, column):
        """A tile's last pair also stands in the columns behind it."""
        pair = tile
        if not direct:
            pair = int32(pairs[tile * NARROW + min(column, int32((entry >> 16) - 1))])
        return pair

    return tiles_of, entry_of, pair_of


@cache
def make(width: int) -> Kernel:
    threads = 512
    warps = threads // WARP
    sizes = width // NARROW  # classes of tiles, by their groups of eight pairs
    cells = warps * sizes

    @cuda.jit(device=True, inline="always")
    def size_of(count):
        """0 for an expert with a tile of the most groups of eight, then 1 and so on."""
        return sizes - min((count + NARROW - 1) // NARROW, sizes)

    @kernel(threads=threads, name=f"moe_group_{width}", registers=96, pdl=True)
    @cuda.jit
    def group_kernel(
        picked: read(int32), plan: write(int32), pairs: write(int32), count: int32, experts: int32
    ):
        places = cuda.shared.array(MOST_EXPERTS, int32)
        sums = cuda.shared.array(cells, int32)
        own = cuda.local.array(sizes, int32)
        before = cuda.local.array(sizes, int32)
        thread = int32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        i = thread
        while i < experts:
            places[i] = 0
            i += threads
        cuda.syncthreads()
        ptx.wait_for_previous()
        ptx.launch_next()
        i = thread
        while i < count:
            expert = int32(picked[i])
            if expert >= 0 and expert < experts:
                cuda.atomic.add(places, expert, 1)
            i += threads
        cuda.syncthreads()
        share = int32(ptx.divide(experts + cuda.gridDim.x - 1, cuda.gridDim.x))
        lowest = int32(cuda.blockIdx.x * share)
        beyond = min(int32(lowest + share), experts)
        each = int32(ptx.divide(experts + threads - 1, threads))
        first = min(thread * each, experts)
        end = min(first + each, experts)
        for s in range(sizes):
            own[s] = 0
        expert = first
        while expert < end:
            found = int32(places[expert])
            for s in range(sizes):
                if size_of(found) == s:
                    own[s] = int32(own[s] + (found + width - 1) // width)
            expert += 1
        for s in range(sizes):
            before[s] = own[s]
            for n in range(5):
                other = int32(ptx.shfl_up(before[s], 1 << n))
                if lane >= 1 << n:
                    before[s] = int32(before[s] + other)
            if lane == 31:
                sums[s * warps + warp] = before[s]
        cuda.syncthreads()
        total = int32(0)
        for s in range(sizes):
            tile = int32(before[s] - own[s])
            for n in range(warps):
                if n < warp:
                    tile = int32(tile + sums[s * warps + n])
            before[s] = int32(tile + total)
            for n in range(warps):
                total = int32(total + sums[s * warps + n])
        if thread == 0 and lowest == 0:
            plan[0] = total
        expert = first
        while expert < end:
            left = int32(places[expert])
            tile = int32(0)
            for s in range(sizes):
                if size_of(left) == s:
                    tile = before[s]
                    before[s] = int32(tile + (left + width - 1) // width)
            places[expert] = tile * width  # of the expert's next pair
            while left > 0 and lowest <= expert and expert < beyond:
                plan[1 + tile] = expert | min(left, width) << 16
                tile = int32(tile + 1)
                left = int32(left - width)
            expert += 1
        cuda.syncthreads()
        i = thread
        while i < count:
            expert = int32(picked[i])
            if lowest <= expert and expert < beyond:
                pairs[cuda.atomic.add(places, expert, 1)] = i
            i += threads

    return group_kernel


def instances() -> list[Kernel]:
    return [make(width) for width in (NARROW, WIDE)]
