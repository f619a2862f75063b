"""All-reduce by lines that carry their own flags: the methods of small payloads.

A line is 16 bytes, (data, epoch, data, epoch), written to a peer in one store. A reader that finds
the epoch in both halves has the data: neither barrier nor fence, one trip between the ranks. The
price is twice the bytes. (NCCL's low-latency protocol; 8 bytes must arrive undivided.)

One shot: every rank sends all it has to all others, and each adds up everything. Two shots: rank d
adds up part d and sends the rounded sum to all; fewer bytes from three ranks on, two trips.
"""

from functools import cache

from numba import cuda, int32, uint32, uint64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.all_reduce_call import (
    ERROR,
    end_call,
    next_epoch,
    ordered_sum,
    receive_lines,
)
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.kernels.launch import Kernel, kernel

THREADS = 512
FEWER = 256  # above 8 ranks, for want of registers
UNIT = 8  # bytes of data in a line


@cache
def make(world: int, element, shots: int) -> Kernel:
    per = UNIT // read(element).dtype.itemsize
    count, threads = 2 * world, THREADS if world <= 8 else FEWER
    receive, add_up = receive_lines(world), ordered_sum(world, element, 2)

    @kernel(
        threads=threads,
        name=f"all_reduce_lines_{shots}_of_{world}_{element}",
        registers=128,
        opcodes=("LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS", "STG.E.64"),
        pdl=True,
    )
    @cuda.jit
    def all_reduce_lines_kernel(
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
        units: int32,
        half: int32,
        early: int32,
    ):  # fmt: skip
        lines = (p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15)
        words = cuda.local.array(count, uint32)
        total = cuda.local.array(2, uint32)
        ptx.wait_for_previous()
        if early != 0:
            ptx.launch_next()
        epoch = next_epoch(control)
        call = (rank, epoch, control, abort, limit, patience)
        stopped = ptx.ld_volatile(control, ERROR)
        first = int32((epoch & 1) * half)
        start = cuda.blockIdx.x * threads + cuda.threadIdx.x
        step = cuda.gridDim.x * threads
        if shots == 1:
            i = int32(start)
            while i < units and stopped == 0:
                a, b = ptx.ldg2(x, i * per)
                for d in range(world):
                    if d != rank:
                        line = first + (rank * units + i) * 4
                        ptx.st_volatile4(lines[d], line, a, epoch, b, epoch)
                i += step
            i = int32(start)
            while i < units and stopped == 0:
                a, b = ptx.ldg2(x, i * per)
                stopped = receive(mine, first, units, i, world * units, a, b, words, call)
                add_up(words, 0, total)
                ptx.stg2(out, i * per, total[0], total[1])
                i += step
        else:
            part = int32((units + world - 1) // world)
            second = first + world * part * 4
            i = int32(start)
            while i < part and stopped == 0:
                for d in range(world):
                    at = int32(d * part + i)
                    if at >= units:
                        at = i  # loaded for nothing
                    words[2 * d], words[2 * d + 1] = ptx.ldg2(x, at * per)
                for d in range(world):
                    if d != rank and d * part + i < units:
                        line, a, b = first + (rank * part + i) * 4, words[2 * d], words[2 * d + 1]
                        ptx.st_volatile4(lines[d], line, a, epoch, b, epoch)
                i += step
            i = int32(start)
            while i < part and rank * part + i < units and stopped == 0:
                a, b = ptx.ldg2(x, (rank * part + i) * per)
                stopped = receive(mine, first, part, i, world * part, a, b, words, call)
                add_up(words, 0, total)
                if stopped == 0:
                    for d in range(world):
                        if d != rank:
                            line = second + (rank * part + i) * 4
                            ptx.st_volatile4(lines[d], line, total[0], epoch, total[1], epoch)
                ptx.stg2(out, (rank * part + i) * per, total[0], total[1])
                i += step
            none = uint32(0)
            i = int32(start)
            while i < part and stopped == 0:
                stopped = receive(mine, second, part, i, units, none, none, words, call)
                for s in range(world):
                    if s != rank and s * part + i < units:
                        ptx.stg2(out, (s * part + i) * per, words[2 * s], words[2 * s + 1])
                i += step
        end_call(control, epoch)

    return all_reduce_lines_kernel
