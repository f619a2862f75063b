"""All-reduce: eight ranks as streams of one GPU, all methods; the ordered sum of what an all-gather
brought. Between GPUs: `multi_gpu.py`.
"""

import os
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

# Ranks are streams, and streams that share a queue would wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from bench.cases import cases
from ddtree_numba.kernels.all_reduce import METHODS, all_reduce, launches
from ddtree_numba.kernels.all_reduce_call import CONTROL_WORDS
from ddtree_numba.kernels.all_reduce_gathered import sum_gathered
from ddtree_numba.kernels.peers import Peers, Room
from ddtree_numba.spec import all_reduce as spec

ROWS = (1, 9, 17, 33, 65)
BLOCKS = 8  # of a rank: those of all ranks are resident together
SIZE = max(ROWS) * 7168 * 2


@cache
def on_gpu(world: int) -> tuple[list, list]:
    """Joined memories, and where the ranks but the first put their sums."""
    import cupy

    from ddtree_numba.model.peer_memory import PeerMemory

    room = Room.of(world, SIZE, SIZE, SIZE)
    memories = [PeerMemory(rank, world, room, blocks=BLOCKS, early=False) for rank in range(world)]
    for memory in memories:
        memory.join_streams(memories)
    return memories, [cupy.empty(SIZE, np.uint8) for _ in range(world)]


def on_cpu(partials: np.ndarray, out: np.ndarray, method: str) -> None:
    from ddtree_numba.kernels import simt

    room = Room.of(len(partials), *3 * [out.nbytes])
    regions = tuple(np.zeros(room.words, np.uint32) for _ in partials)
    made = []
    for rank, x in enumerate(partials):
        words = np.zeros(CONTROL_WORDS, np.uint32), np.zeros(1, np.uint32)
        to = out if rank == 0 else np.empty_like(out)
        made += launches(x, Peers(rank, regions, room, *words), to, method)
    simt.run_together([simt.Launch(kernel, grid, kernel.threads, a) for kernel, grid, a in made])


def all_ranks(method: str) -> Any:
    """A call of every rank, forked from the stream and joined with it."""

    def call(partials: Any, *, out: Any, stream: Any) -> None:
        if isinstance(out, np.ndarray):
            return on_cpu(partials, out, method)
        memories, others = on_gpu(len(partials))
        begin = stream.record()
        for memory, x, other in zip(memories, partials, others, strict=True):
            memory.stream.wait_event(begin)
            to = other[: out.nbytes].view(out.dtype).reshape(out.shape) if memory.rank else out
            all_reduce(x, memory.peers, out=to, method=method, stream=memory.stream)
            stream.wait_event(memory.stream.record())

    return call


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases(spec, rows=ROWS, smoke="two_ranks"))
def bench_all_reduce(measure, case, method):
    measure(replace(case, name=f"{case.name}-{method}"), all_ranks(method))


@pytest.mark.parametrize("case", cases(spec, smoke="two_ranks"))
def bench_all_reduce_gathered(measure, case):
    measure(replace(case, name=f"{case.name}-gathered"), sum_gathered)
