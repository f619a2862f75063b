"""All-gather by reading what the peers have laid out; see `all_reduce_pull.py`."""

from functools import cache

from numba import cuda, int32, uint32, uint64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.all_reduce_call import (
    ERROR,
    MOST_RANKS,
    end_call,
    meet_blocks,
    next_epoch,
)
from ddtree_numba.kernels.all_reduce_pull import FLAGS, THREADS, each_of, lay_out, load, store
from ddtree_numba.kernels.arguments import read, update
from ddtree_numba.kernels.launch import Kernel, kernel


@cache
def make(world: int) -> Kernel:
    each = each_of(world)
    moved = each * world
    count = 4 * moved
    lay, meet = lay_out(moved, 4), meet_blocks(world)

    @kernel(
        threads=THREADS,
        name=f"all_gather_pull_of_{world}",
        registers=128,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def all_gather_pull_kernel(
        x: read(uint32),
        out: update(uint32),
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
        before: int32,
        pieces: int32,
        width: int32,
        half: int32,
        early: int32,
    ):  # fmt: skip
        peers = (p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15)
        words = cuda.local.array(count, uint32)
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
            lay(x, before, mine, base, pieces, words)
        stopped = meet(peers, mine, cuda.blockIdx.x * MOST_RANKS, stopped, call)
        i = int32(start)
        while i < pieces and stopped == 0:
            for n in range(each):
                at = base + min(i + n * step, last) * 4
                for s in range(world):
                    load(peers[s], at, words, n * world + s)
            for n in range(each):
                if i + n * step < pieces:
                    at = before + i + n * step
                    row = int32(ptx.divide(at, width))
                    to = at + row * width * (world - 1)
                    for s in range(world):
                        store(out, (to + s * width) * 4, words, n * world + s)
            i += each * step
        end_call(control, epoch)

    return all_gather_pull_kernel
