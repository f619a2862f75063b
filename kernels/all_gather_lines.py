"""All-gather by lines that carry their own flags; see `all_reduce_lines.py`."""

from functools import cache

from numba import cuda, int32, uint32, uint64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.all_reduce_call import ERROR, end_call, next_epoch, receive_lines
from ddtree_numba.kernels.all_reduce_lines import FEWER, THREADS
from ddtree_numba.kernels.arguments import read, update
from ddtree_numba.kernels.launch import Kernel, kernel


@cache
def make(world: int) -> Kernel:
    count, threads = 2 * world, THREADS if world <= 8 else FEWER
    receive = receive_lines(world)

    @kernel(
        threads=threads,
        name=f"all_gather_lines_of_{world}",
        registers=128,
        opcodes=("LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS", "STG.E.64"),
        pdl=True,
    )
    @cuda.jit
    def all_gather_lines_kernel(
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
        units: int32,
        width: int32,
        half: int32,
        early: int32,
    ):  # fmt: skip
        lines = (p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15)
        words = cuda.local.array(count, uint32)
        ptx.wait_for_previous()
        if early != 0:
            ptx.launch_next()
        epoch = next_epoch(control)
        call = (rank, epoch, control, abort, limit, patience)
        stopped = ptx.ld_volatile(control, ERROR)
        first = int32((epoch & 1) * half)
        start = cuda.blockIdx.x * threads + cuda.threadIdx.x
        step = cuda.gridDim.x * threads
        i = int32(start)
        while i < units and stopped == 0:
            a, b = ptx.ldg2(x, (before + i) * 2)
            for d in range(world):
                if d != rank:
                    ptx.st_volatile4(lines[d], first + (rank * units + i) * 4, a, epoch, b, epoch)
            i += step
        i = int32(start)
        while i < units and stopped == 0:
            a, b = ptx.ldg2(x, (before + i) * 2)
            stopped = receive(mine, first, units, i, world * units, a, b, words, call)
            row = int32(ptx.divide(before + i, width))
            to = before + i + row * width * (world - 1)
            for s in range(world):
                ptx.stg2(out, (to + s * width) * 2, words[2 * s], words[2 * s + 1])
            i += step
        end_call(control, epoch)

    return all_gather_lines_kernel
