"""Ranks as streams of one process on one GPU, for the tests of what they exchange.

The blocks of all ranks are resident together, so each rank takes few. Under a sanitizer, which may
run kernels one by one, ranks would wait for each other in vain: only `small` tests run there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Streams that share a queue would wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from ddtree_numba.kernels.peers import Room
from ddtree_numba.model.peer_memory import PeerMemory


@contextmanager
def peer_streams(config: Any) -> Iterator[Any]:
    """make(world): memories that are joined; closed afterwards."""
    made = []

    def make(world, rows=17, **options):
        if world > 1 and config.pluginmanager.hasplugin("bench.unpooled"):
            pytest.skip("several ranks under a sanitizer")
        size = rows * 7168 * 2
        options = dict(blocks=64 // world, early=False) | options
        room = Room.of(world, size, size, size)
        memories = [PeerMemory(rank, world, room, **options) for rank in range(world)]
        made.extend(memories)
        for memory in memories:
            memory.join_streams(memories)
        return memories

    yield make
    for memory in made:
        memory.stream.synchronize()
    for memory in made:
        memory.close()


def captured(memory: Any, work: Any) -> Any:
    """`work` as a graph of the memory's stream; its kernels have been loaded."""
    with memory.stream:
        memory.stream.begin_capture()
        work()
        graph = memory.stream.end_capture()
    graph.upload(memory.stream)
    memory.stream.synchronize()
    return graph
