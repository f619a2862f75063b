"""Exchange memory of the ranks of a group, for `kernels/all_reduce.py`.

    memory = PeerMemory(rank, world, room)       # on the current device
    memory.join_processes(gather)                # or: join_streams(memories), ranks of one process
    all_reduce(x, memory.peers, out=out, stream=stream)

A region comes from the driver and never from CuPy's pool: an IPC handle names the whole allocation,
so that two arrays of a pool have one handle. It is a multiple of 2 MiB, below which the driver
shares an allocation too, and ends with a stamp that the peers look for after they have opened it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddtree_numba.kernels.all_reduce import METHODS, all_reduce, ready
from ddtree_numba.kernels.all_reduce_call import CONTROL_WORDS
from ddtree_numba.kernels.arguments import bf16
from ddtree_numba.kernels.driver import DeviceError
from ddtree_numba.kernels.peers import Peers, Room
from ddtree_numba.spec import all_reduce as spec
from ddtree_numba.spec.numerics import BF16

GRANULE = 2 << 20
STAMP = 0x52415245  # behind the room: this and the rank
SIZES = (16, 384, 14_336, 243_712)  # bytes of the self-test: the least, one row of both models, 17


class PeerMemory:
    """A rank's region, control block and abort word, and, once joined, its `peers`."""

    def __init__(self, rank: int, world: int, room: Room, **options: Any) -> None:
        """options: limit, blocks, early of `Peers`."""
        import cupy

        self.cupy, self.runtime = cupy, cupy.cuda.runtime
        self.rank, self.world, self.room, self.options = rank, world, room, options
        self.device = cupy.cuda.Device().id
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.size = -(-(room.words * 4 + 8) // GRANULE) * GRANULE
        self.address = self.runtime.malloc(self.size)
        self.runtime.memset(self.address, 0, self.size)
        self._at(self.address, room.words + 2)[-2:] = cupy.asarray([STAMP, rank], np.uint32)
        self.control = cupy.zeros(CONTROL_WORDS, np.uint32)
        self._pinned = cupy.cuda.alloc_pinned_memory(64)
        self._abort = np.frombuffer(self._pinned, np.uint32, 1)
        self._abort[0] = 0
        self._opened: list[int] = []
        self.peers: Peers | None = None
        cupy.cuda.Device().synchronize()

    def _at(self, address: int, words: int) -> Any:
        """uint32 words at an address that stays this object's affair."""
        memory = self.cupy.cuda.UnownedMemory(address, 4 * words, self, self.device)
        pointer = self.cupy.cuda.MemoryPointer(memory, 0)
        return self.cupy.ndarray((words,), np.uint32, pointer)

    def join_streams(self, memories: Sequence["PeerMemory"]) -> None:
        """The group's other ranks are objects of this process, on the same device."""
        self._join([memory.address for memory in memories])

    def join_processes(self, gather: Callable[[bytes], list[bytes]]) -> None:
        """`gather` returns what every rank gave it, in rank order; each has a process and a GPU."""
        handles = gather(self.runtime.ipcGetMemHandle(self.address))
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self.rank:
                addresses.append(self.address)
                continue
            try:
                self._opened.append(self.runtime.ipcOpenMemHandle(handle))
            except self.runtime.CUDARuntimeError as error:
                raise DeviceError(
                    f"rank {self.rank} cannot reach the memory of rank {rank}: {error}"
                ) from error
            addresses.append(self._opened[-1])
        self._join(addresses)

    def _join(self, addresses: list[int]) -> None:
        for rank, address in enumerate(addresses):
            stamp = self._at(address, self.room.words + 2)[-2:].get().tolist()
            if stamp != [STAMP, rank]:
                raise DeviceError(f"rank {self.rank}: what rank {rank} exported is not its region")
        regions = tuple(self._at(address, self.room.words) for address in addresses)
        abort = self._at(self._pinned.ptr, 1)
        ready(self.world, bf16)
        self.peers = Peers(self.rank, regions, self.room, self.control, abort, **self.options)

    def abort(self) -> None:
        """End all waits of this rank, from any thread, at once and for good."""
        self._abort[0] = 1

    def close(self) -> None:
        """Give the memory back. No rank may still use it: first a barrier, and graphs dropped."""
        self.peers = None
        for address in self._opened:
            self.runtime.ipcCloseMemHandle(address)
        self._opened = []
        if self.address:
            self.runtime.free(self.address)
            self.address = 0


def self_test(memories: Sequence[PeerMemory], sizes: Sequence[int] = SIZES) -> list[str]:
    """What is wrong with the group's all-reduce, a line each; all ranks call it together.

    memories: of the ranks of this process. Every method with every size, every value compared with
    the specification; the first wait that fails ends it, since a rank's later calls do nothing.
    """
    wrong: list[str] = []
    world = memories[0].world
    for method in METHODS:
        for size in sizes:
            partials = _partials(world, size)
            expected = spec.all_reduce(partials)
            xs, outs = [], []
            for memory in memories:
                with memory.stream:
                    xs.append(memory.cupy.asarray(partials[memory.rank]))
                    outs.append(memory.cupy.empty_like(xs[-1]))
            for memory in memories:
                memory.stream.synchronize()  # nothing is allocated or copied while a rank waits
            for memory, x, out in zip(memories, xs, outs, strict=True):
                all_reduce(x, memory.peers, out=out, method=method, stream=memory.stream)
            for memory, out in zip(memories, outs, strict=True):
                got = out.get(stream=memory.stream)
                failure = memory.peers.failure()
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
