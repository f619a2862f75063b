"""All-reduce by reading what the peers have laid out: the methods of large payloads.

A rank copies x to where its peers can read it, raises a flag a block, and adds up what all have.
The copy costs less than the second set of bytes that lines need.

One shot: every rank reads everything. Two shots: rank s adds up every world-th piece from the s-th
on, lays the rounded sum where its own piece was, which no other rank reads, and all collect.
"""

from functools import cache

from numba import cuda, int32, uint32, uint64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.all_reduce_call import (
    ERROR,
    MOST_RANKS,
    end_call,
    meet_blocks,
    next_epoch,
    ordered_sum,
)
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.kernels.launch import Kernel, kernel

THREADS = 256
PIECE = 16  # bytes that a thread moves at once
MOST_BLOCKS = 256
FLAGS = 2 * MOST_BLOCKS * MOST_RANKS  # words in front of the data: meeting, block, rank
UNDER_WAY = 8  # loads of 16 bytes that a thread issues together


@cuda.jit(device=True, inline="always")
def load(x, i, words, n):
    words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3] = ptx.ldg4(x, i)


@cuda.jit(device=True, inline="always")
def store(x, i, words, n):
    ptx.stg4(x, i, words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3])


def each_of(world: int) -> int:
    """Pieces that a thread adds up, each of `world` loads."""
    return max(UNDER_WAY // world, 1)


@cache
def lay_out(moved: int, per: int):
    """A device function that copies x to where the peers read it, `moved` pieces of a thread
    together; `per` elements of x are a piece."""

    @cuda.jit(device=True, inline="always")
    def lay(x, before, mine, base, pieces, words):
        step, last = cuda.gridDim.x * THREADS, int32(pieces - 1)
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        while i < pieces:
            for n in range(moved):
                load(x, (before + min(i + n * step, last)) * per, words, n)
            for n in range(moved):
                if i + n * step < pieces:
                    store(mine, base + (i + n * step) * 4, words, n)
            i += moved * step

    return lay


@cache
def make(world: int, element, shots: int) -> Kernel:
    per = PIECE // read(element).dtype.itemsize
    each = each_of(world)
    moved = each * world  # pieces that a thread copies together
    count, apart = 4 * moved, 1 if shots == 1 else world
    lay, meet = lay_out(moved, per), meet_blocks(world)
    add_up = ordered_sum(world, element, 4)

    @kernel(
        threads=THREADS,
        name=f"all_reduce_pull_{shots}_of_{world}_{element}",
        registers=128,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def all_reduce_pull_kernel(
        x: read(element),
        out: write(element),
        p0: update(uint32), p1: update(uint32), p2: update(uint32), p3: update(uint32),
        p4: update(uint32), p5: update(uint32), p6: update(uint32), p7: update(uint32),
        p8: update(uint32), p9: update(uint32), p10: update(uint32), p11: update(uint32),
        p12: update(uint32), p13: update(uint32), p14: update(uint32), p15: update(uint32),
        mine: update(uint32),
        control: update(uint32),
        abort: read(uint32),
        limit: uint64,
        patience: int32,
        rank: int32,
        pieces: int32,
        half: int32,
        early: int32,
    ):  # fmt: skip
        peers = (p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15)
        words = cuda.local.array(count, uint32)
        total = cuda.local.array(4, uint32)
        ptx.wait_for_previous()
        if early != 0:
            ptx.launch_next()
        epoch = next_epoch(control)
        call = (rank, epoch, control, abort, limit, patience)
        stopped = ptx.ld_volatile(control, ERROR)
        base = FLAGS + int32((epoch & 1) * half)
        start = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        step = cuda.gridDim.x * THREADS
        last = int32(pieces - 1)
        if stopped == 0:
            lay(x, 0, mine, base, pieces, words)
        flags = cuda.blockIdx.x * MOST_RANKS
        stopped = meet(peers, mine, flags, stopped, call)
        i = int32(start)
        if shots == 2:
            i += rank * step
        while i < pieces and stopped == 0:
            for n in range(each):
                at = base + min(i + n * apart * step, last) * 4
                for s in range(world):
                    load(peers[s], at, words, n * world + s)
            for n in range(each):
                at = i + n * apart * step
                if at < pieces:
                    add_up(words, 4 * n * world, total)
                    store(out, at * per, total, 0)
                    if shots == 2:
                        store(mine, base + at * 4, total, 0)
            i += each * apart * step
        if shots == 2:
            flags += MOST_BLOCKS * MOST_RANKS
            stopped = meet(peers, mine, flags, stopped, call)
            i = int32(start)
            while i < pieces and stopped == 0:
                for n in range(moved):
                    load(peers[n % world], base + min(i + n * step, last) * 4, words, n)
                for n in range(moved):
                    if n % world != rank and i + n * step < pieces:
                        store(out, (i + n * step) * per, words, n)
                i += moved * step
        end_call(control, epoch)

    return all_reduce_pull_kernel
