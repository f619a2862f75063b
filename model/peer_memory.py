"""Exchange memory of the ranks of a group, for `kernels/all_reduce.py` and `all_gather.py`.

    memory = connect(rank, world, room, gather)             # processes, each with its GPU
    all_reduce(x, memory.peers, out=out, stream=stream)

`connect` takes device memory where the ranks' self-test passes over it, else pinned host memory,
and names what failed. Ranks that are streams of one process make a PeerMemory each, then
`join_streams`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ddtree_numba.kernels import all_gather, all_reduce
from ddtree_numba.kernels.all_reduce_call import CONTROL_WORDS
from ddtree_numba.kernels.arguments import bf16
from ddtree_numba.kernels.driver import DeviceError
from ddtree_numba.kernels.peers import Peers, Room
from ddtree_numba.model.peer_regions import REGIONS
from ddtree_numba.spec import all_reduce as spec
from ddtree_numba.spec.numerics import BF16

Gather = Callable[[bytes], list[bytes]]  # what every rank gave, in rank order; a barrier as well
STAMP = 0x52415245  # behind the room, with the rank: shows that the right memory was opened
SIZES = (16, 384, 14_336, 243_712)  # bytes of the self-test: the least, one row of both models, 17
TEST_LIMIT = 5_000_000_000  # ns


class PeerMemory:
    """A rank's region, control block and abort word, and, once joined, its `peers`."""

    def __init__(
        self, rank: int, world: int, room: Room, where: str = "device", **options: Any
    ) -> None:
        """On the current device. options: limit, blocks, early of `Peers`."""
        import cupy

        self.cupy, self.rank, self.world, self.room = cupy, rank, world, room
        self.options = options
        self.device = cupy.cuda.Device().id
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.region: Any = REGIONS[where](room.words * 4 + 8)
        self.handle = self.region.handle()
        self._stamp(self.region.address)[...] = cupy.asarray([STAMP, rank], np.uint32)
        self.control = cupy.zeros(CONTROL_WORDS, np.uint32)
        self._pinned = cupy.cuda.alloc_pinned_memory(64)
        self._abort = np.frombuffer(self._pinned, np.uint32, 1)
        self._abort[0] = 0
        self.peers: Peers | None = None
        cupy.cuda.Device().synchronize()

    def _at(self, address: int, words: int) -> Any:
        """uint32 words at an address that CuPy does not own."""
        memory = self.cupy.cuda.UnownedMemory(address, 4 * words, self, self.device)
        pointer = self.cupy.cuda.MemoryPointer(memory, 0)
        return self.cupy.ndarray((words,), np.uint32, pointer)

    def _stamp(self, address: int) -> Any:
        return self._at(address + 4 * self.room.words, 2)

    def join_streams(self, memories: Sequence["PeerMemory"]) -> None:
        """The group's other ranks are objects of this process, on the same device."""
        self._join([memory.region.address for memory in memories])

    def join_processes(self, gather: Gather) -> None:
        """The group's other ranks are processes of this host."""
        handles = gather(self.handle)
        addresses = []
        for rank, handle in enumerate(handles):
            own = rank == self.rank
            addresses.append(self.region.address if own else self.region.open(handle))
        self._join(addresses)

    def _join(self, addresses: list[int]) -> None:
        for rank, address in enumerate(addresses):
            if self._stamp(address).get().tolist() != [STAMP, rank]:
                raise DeviceError(f"what rank {rank} exported is not its region")
        regions = tuple(self._at(address, self.room.words) for address in addresses)
        abort = self._at(self._pinned.ptr, 1)
        self.peers = Peers(self.rank, regions, self.room, self.control, abort, **self.options)
        all_reduce.ready(self.world, bf16)
        all_gather.ready(self.world)

    def abort(self) -> None:
        """End all waits of this rank, from any thread, at once and for good."""
        self._abort[0] = 1

    def close(self) -> None:
        """Give the memory back. No rank may still use it: first a barrier, and graphs dropped."""
        self.peers = None
        self.region.close()


def connect(
    rank: int,
    world: int,
    room: Room,
    gather: Gather,
    kinds: Sequence[str] = tuple(REGIONS),
    **options: Any,
) -> tuple[PeerMemory, list[str]]:
    """Memory over which the group's self-test passes, and what was wrong with the kinds before.

    Every rank calls it, and all get the same kind; DeviceError names what was wrong with each.
    """
    wrong: list[str] = []

    def agreed(own: list[str]) -> bool:
        """Every rank is content; else what they say is noted."""
        said = [json.loads(text) for text in gather(json.dumps(own).encode())]
        wrong.extend(
            f"{where} memory, rank {number}: {line}"
            for number, lines in enumerate(said)
            for line in lines
        )
        return not any(said)

    for where in kinds:
        memory = None
        own: list[str] = []
        try:
            memory = PeerMemory(rank, world, room, where, **options)
        except Exception as error:
            own = [str(error)]
        if agreed(own):
            assert memory is not None
            try:
                memory.join_processes(gather)
            except Exception as error:
                own = [str(error)]
            if agreed(own) and agreed(self_test([memory])):
                return memory, wrong
        if memory:
            memory.close()
    raise DeviceError(f"no memory for all_reduce: {'; '.join(wrong)}")


def self_test(memories: Sequence[PeerMemory], sizes: Sequence[int] = SIZES) -> list[str]:
    """What is wrong with the group's all-reduce, a line each; all ranks call it together.

    memories: of the ranks of this process. Every method with every size, every value compared with
    the specification; the first wait that fails ends it, since a rank's later calls do nothing.
    """
    wrong: list[str] = []
    group = []
    for memory in memories:
        assert memory.peers is not None, "not joined"
        group.append(replace(memory.peers, limit=min(memory.peers.limit, TEST_LIMIT)))
    for method in all_reduce.METHODS:
        for size in sizes:
            partials = _partials(memories[0].world, size)
            expected = spec.all_reduce(partials)
            xs, outs = [], []
            for memory in memories:
                with memory.stream:
                    xs.append(memory.cupy.asarray(partials[memory.rank]))
                    outs.append(memory.cupy.empty_like(xs[-1]))
            for memory in memories:
                memory.stream.synchronize()  # nothing is allocated or copied while a rank waits
            for memory, peers, x, out in zip(memories, group, xs, outs, strict=True):
                all_reduce.all_reduce(x, peers, out=out, method=method, stream=memory.stream)
            for memory, peers, out in zip(memories, group, outs, strict=True):
                got = out.get(stream=memory.stream)
                failure = peers.failure()
                if failure:
                    return [*wrong, f"{method}, {size} bytes: {failure}"]
                count = np.count_nonzero(got.view(np.uint16) != expected.view(np.uint16))
                if count:
                    wrong.append(
                        f"{method}, {size} bytes, rank {memory.rank}: "
                        f"{count} of {got.size} values differ from the sum in rank order"
                    )
    return wrong


def _partials(world: int, size: int) -> np.ndarray:
    """The same on every rank; exponents of 6 bits, so that another order has other sums."""
    rng = np.random.default_rng(size)
    shape = world, size // BF16.itemsize
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-32, 32, shape))).astype(BF16)
