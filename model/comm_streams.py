"""Ranks as streams of one process on one GPU: tensor parallelism without more cards.

A thread a rank starts its operations on a stream of its own. Where ranks meet, their threads meet
on the host and exchange events; on the device each stream waits for the others' events and adds
up by itself. No kernel waits for another rank, so any number of ranks fits on a device, and one
graph holds the rounds of all.
"""

from collections.abc import Callable
from typing import Any

from ddtree_numba.kernels.all_reduce_gathered import sum_gathered
from ddtree_numba.model.comm import Sound, ThreadGroup, Traffic
from ddtree_numba.model.cuda_arrays import Array


class StreamGroup(ThreadGroup):
    """Rank 0 is the calling thread and its stream; the other streams branch off and come back."""

    def __init__(self, backends: list[Any]) -> None:
        super().__init__(len(backends))
        self.backends = backends
        self.comms: list[Any] = [StreamComm(self, rank) for rank in range(self.world)]
        # A graph of rank 0's stream holds work of all: whatever others allocate may be part of it.
        self.pools = [None, *(ops.new_pool() for ops in backends[1:])]

    def run(self, work: Callable[[int], object]) -> list:
        """work(rank) on every rank; what follows on rank 0's stream follows all of it.

        Also what follows a failure: others may still read memory that rank 0 has given back.
        """
        lead = self.backends[0]
        begun = lead.point(lead.stream)
        ended: list[Any] = [None] * self.world

        def call(rank: int) -> object:
            ops = self.backends[rank]
            with ops.xp.cuda.Device(ops.index), ops.active(self.pools[rank]):
                if rank:
                    ops.stream.wait_event(begun)
                try:
                    return work(rank)
                finally:
                    ended[rank] = ops.point(ops.stream)

        try:
            return self._together(call, here=True)
        finally:
            for event in filter(None, ended[1:]):
                lead.stream.wait_event(event)


class StreamComm(Sound):
    """One rank of a `StreamGroup`."""

    link = "one GPU"

    def __init__(self, group: StreamGroup, rank: int) -> None:
        self.group, self.rank, self.world = group, rank, group.world
        self.ops = group.backends[rank]
        self.traffic = Traffic()

    def all_reduce(self, partial: Array) -> Array:
        """Sum [T,H] over ranks, in rank order, in float32, rounded once."""
        return sum_gathered(self.gather(partial), out=self.ops.empty(partial.shape, partial.dtype))

    def all_gather(self, part: Array) -> Array:
        """Join the ranks' parts along the last axis, in rank order."""
        return self.gather(part, joined=True)

    def gather(self, x: Array, joined: bool = False) -> Array:
        """Every rank's x: [W, ...], or joined along the last axis."""
        self.traffic.count(x)
        gathered = self.ops.empty((self.world, *x.shape), x.dtype)
        for rank, part in enumerate(self._met(x)):
            self.ops.copy(part, gathered[rank])
        self._met()  # nobody's x is given back before all have read it
        return along_rows(gathered) if joined else gathered

    def _met(self, x: Array | None = None) -> list[Array]:
        """Every rank's x; what follows on the stream follows what was before, on all ranks."""
        ops = self.ops
        given = self.group.exchange(self.rank, (x, ops.point(ops.stream)))
        for rank, (_, event) in enumerate(given):
            if rank != self.rank:
                ops.stream.wait_event(event)
        return [part for part, _ in given]


def along_rows(parts: Array) -> Array:
    """[W, ..., n] -> [..., W n]."""
    *_, width = parts.shape
    rows = parts.reshape(len(parts), -1, width).transpose(1, 0, 2)
    return rows.reshape(*parts.shape[1:-1], len(parts) * width)
