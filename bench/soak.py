"""All-reduce and all-gather for a long time: values made, exchanged and compared in graphs.

A step is four kernels: wait a random time and fill x, exchange, compare every word with the sum in
rank order or with what each rank had, count the step. What a rank fills is a function of step, rank
and place, so that each rank knows what all of them had. The sum in reverse order is compared as
well and must differ somewhere, or the comparison would not see the order at all.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32, uint32, uint64

from ddtree_numba.kernels import all_gather, all_reduce, ptx
from ddtree_numba.kernels.arguments import bf16, read, update, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.spec.numerics import BF16

THREADS = 256
WIDTH = 7168
MOST_DELAY = 20_000  # ns
WRONG, DIFFERENT_ORDER, STEP = 0, 1, 2  # words of a rank's counts


@cuda.jit(device=True, inline="always")
def mixed(i, step, rank):
    """A hash of three numbers."""
    h = uint32(uint32(i * 0x9E3779B1) ^ uint32(step * 0x85EBCA6B) ^ uint32((rank + 1) * 0xC2B2AE35))
    h = uint32((h ^ h >> 16) * 0x7FEB352D)
    h = uint32((h ^ h >> 15) * 0x846CA68B)
    return uint32(h ^ h >> 16)


@cuda.jit(device=True, inline="always")
def two_values(i, step, rank):
    """Two bfloat16 with exponents of 6 bits: in about one of 3,000 sums of 8 the order shows."""
    h, g = mixed(i, step, rank), mixed(i + 0x3C6EF372, step, rank)
    return uint32(h & 0x807F807F | (96 + (g & 63)) << 7 | (96 + (g >> 8 & 63)) << 23)


@kernel(threads=THREADS, pdl=True)
@cuda.jit
def fill(x: write(bf16), counts: read(uint32), words: int32, rank: int32, delay: uint64):
    ptx.wait_for_previous()
    step = counts[STEP]
    start = ptx.globaltimer()
    wait = uint64(mixed(7, step, rank + 100) & 0xFFFF) * delay >> uint64(16)
    while ptx.globaltimer() - start < wait:
        pass
    i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    while i < words:
        ptx.stg1(x, 2 * i, two_values(i, step, rank))
        i += cuda.gridDim.x * THREADS


@cache
def make_compare(world: int) -> Kernel:
    @kernel(threads=THREADS, name=f"compare_{world}", pdl=True)
    @cuda.jit
    def compare(out: read(bf16), counts: update(uint32), words: int32):
        ptx.wait_for_previous()
        step = counts[STEP]
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        while i < words:
            up = two_values(i, step, 0)
            down = two_values(i, step, world - 1)
            low, high = ptx.as_float(up << 16), ptx.as_float(up & 0xFFFF0000)
            low_down, high_down = ptx.as_float(down << 16), ptx.as_float(down & 0xFFFF0000)
            for s in range(1, world):
                up = two_values(i, step, s)
                down = two_values(i, step, world - 1 - s)
                low = low + ptx.as_float(up << 16)
                high = high + ptx.as_float(up & 0xFFFF0000)
                low_down = low_down + ptx.as_float(down << 16)
                high_down = high_down + ptx.as_float(down & 0xFFFF0000)
            word = ptx.ldg1(out, 2 * i)
            if word != ptx.pack_bf16(high, low):
                ptx.atom_add(counts, WRONG, 1)
            if word != ptx.pack_bf16(high_down, low_down):
                ptx.atom_add(counts, DIFFERENT_ORDER, 1)
            i += cuda.gridDim.x * THREADS

    return compare


@kernel(threads=THREADS, pdl=True)
@cuda.jit
def compare_gathered(out: read(bf16), counts: update(uint32), words: int32, width: int32):
    """Joined rows of `width` words of each rank."""
    ptx.wait_for_previous()
    step = counts[STEP]
    i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    while i < words:
        column, world = i % width, cuda.gridDim.y
        at = int32((i // width * world + cuda.blockIdx.y) * width + column)
        if ptx.ldg1(out, 2 * at) != two_values(i, step, cuda.blockIdx.y):
            ptx.atom_add(counts, WRONG, 1)
        i += cuda.gridDim.x * THREADS


@kernel(threads=32, pdl=True)
@cuda.jit
def next_step(counts: update(uint32)):
    ptx.wait_for_previous()
    if cuda.threadIdx.x == 0:
        counts[STEP] = counts[STEP] + 1


class Soak:
    """One rank's soak: `steps` of every method and number of rows, as a graph that is replayed.

    Sums and gathers alternate.
    """

    def __init__(self, memory: Any, rows: tuple[int, ...], blocks: int = 16, delay=MOST_DELAY):
        cupy = memory.cupy
        self.memory = memory
        gathers = 2 * all_gather.METHODS
        self.steps = [
            step
            for n in rows
            for sum_by, gather_by in zip(all_reduce.METHODS, gathers, strict=True)
            for step in (("sum", sum_by, n), ("gather", gather_by, n))
        ]
        with memory.stream:
            self.counts = cupy.zeros(3, np.uint32)
            x = cupy.zeros((max(rows), WIDTH), BF16)
            other = cupy.zeros_like(x)
            joined = cupy.zeros(memory.world * x.size, BF16)
        compare, rank = make_compare(memory.world), memory.rank
        for each in (fill, compare, compare_gathered, next_step):
            each.ready()

        def work(stream: Any) -> None:
            for number, (kind, method, n) in enumerate(self.steps):
                words, given = n * WIDTH // 2, dict(method=method, stream=stream)
                fill.launch(blocks, x, self.counts, words, rank, delay, stream=stream)
                if kind == "sum":
                    out = (x, other)[number // 2 % 2][:n]
                    all_reduce.all_reduce(x[:n], memory.peers, out=out, **given)
                    compare.launch(blocks, out, self.counts, words, stream=stream)
                else:
                    out = joined[: memory.world * n * WIDTH].reshape(n, -1)
                    all_gather.all_gather(x[:n], memory.peers, out=out, **given)
                    grid, width = (blocks, memory.world), WIDTH // 2
                    compare_gathered.launch(grid, out, self.counts, words, width, stream=stream)
                next_step.launch(1, self.counts, stream=stream)

        self.work = work

    def run(self) -> None:
        """Once, outside of a graph: loads the kernels. All ranks must do it."""
        self.work(self.memory.stream)

    def capture(self) -> None:
        stream = self.memory.stream
        with stream:
            stream.begin_capture()
            self.work(stream)
            self.graph = stream.end_capture()
        self.graph.upload(stream)

    def replay(self) -> None:
        self.graph.launch(self.memory.stream)

    def result(self) -> dict:
        wrong, different, steps = self.counts.get(stream=self.memory.stream).tolist()
        failure = self.memory.peers.failure()
        return dict(calls=steps, wrong=wrong, different_in_reverse=different, failure=failure)
