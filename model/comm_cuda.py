"""Sums and gathers of ranks that are processes, each with its GPU: kernels in its stream's order.

Ranks of one machine meet in memory that all of them reach, `peer_memory.py`. Between machines, and
where NCCL's own sum is asked for, NCCL carries what ranks give. Both can be captured in graphs.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ddtree_numba.kernels import driver
from ddtree_numba.kernels.all_reduce import all_reduce
from ddtree_numba.kernels.all_reduce_gathered import sum_gathered
from ddtree_numba.kernels.driver import DeviceError
from ddtree_numba.kernels.peers import Room
from ddtree_numba.model.comm import Comm, Traffic
from ddtree_numba.model.comm_streams import along_rows
from ddtree_numba.model.comm_tcp import RankError
from ddtree_numba.model.cuda_arrays import Array
from ddtree_numba.model.cuda_heads import gather_over
from ddtree_numba.model.peer_memory import PeerMemory, connect
from ddtree_numba.model.peer_regions import REGIONS, HostRegion
from ddtree_numba.model.place import MEETING, machine, meeting_way
from ddtree_numba.model.watch import ProcessGroup

LINE_ROWS, PULL_ROWS = 65, 256  # rows of the model's width that a call moves at once by either way
POLL = 50e-6  # seconds between looks at a round that NCCL carries
# Event nodes beside every collective would cost the host a millisecond a graph (NCCL 2.28).
NCCL_ENVIRONMENT = dict(NCCL_GRAPH_MIXING_SUPPORT="0")


def connected(
    group: ProcessGroup, ops: Any, width: int, fast: bool, note: Callable[[str], None]
) -> "CudaComm":
    """This rank's connection, after a self-test; rows are of `width` bfloat16.

    Rank 0's environment may name the way, else the first that works is taken; note(line) says why
    one before does not. fast: by NCCL's own all-reduce, whose sums for more than two ranks depend
    on their number of rows. DeviceError, ImportError or ValueError, in one line, if ranks cannot
    reach each other in the way that is named, or in any.
    """
    wanted = group.comm.broadcast(meeting_way().encode()).decode()
    machines = len(set(group.comm.gather(machine().encode())))
    beyond = "--fast-allreduce" if fast else f"{machines} machines" if machines > 1 else ""
    if beyond and wanted not in ("", "nccl"):
        raise ValueError(f"{MEETING} {wanted}: with {beyond} ranks meet through NCCL")
    comm: CudaComm | None = None
    if not beyond and wanted != "nccl":
        try:
            comm = PeerComm(peer_memory(group, ops, width, wanted, note), ops, group)
        except DeviceError as error:  # of all ranks
            if wanted:
                raise
            note(f"ranks: {error}")
    comm = comm or NcclComm(group, ops, fast)
    group.stops.append(comm.abort)
    group.farewells.append(comm.leave)
    return comm


def room_of(world: int, width: int) -> Room:
    """For rows of `width` bfloat16."""
    row = 2 * width
    return Room.of(world, LINE_ROWS * row, LINE_ROWS * row, PULL_ROWS * row)


def peer_memory(
    group: ProcessGroup, ops: Any, width: int, where: str, note: Callable[[str], None]
) -> PeerMemory:
    """Memory that all ranks reach: of the GPUs, or else of the host."""
    room = room_of(group.world, width)
    gather, limit = group.comm.gather, int(group.place.seconds * 1e9)
    kinds = [where] if where else list(REGIONS)
    memory, wrong = connect(group.rank, group.world, room, gather, kinds, limit=limit)
    for line in wrong:
        note(f"ranks: {line}")
    near = all(
        driver.over_nvlink(ops.index, other.decode()) for other in gather(ops.bus_id.encode())
    )
    near = all(gather(b"near" if near else b""))  # all choose the same methods
    link = "host" if isinstance(memory.region, HostRegion) else "nvlink" if near else "pcie"
    assert memory.peers is not None
    memory.peers = replace(memory.peers, link=link)
    return memory


class CudaComm(Comm):
    """What both ways share."""

    faults = None

    def __init__(self, group: ProcessGroup, ops: Any) -> None:
        self.group, self.ops = group, ops
        self.rank, self.world = group.rank, group.world
        self.traffic = Traffic()

    def all_gather(self, part: Array) -> Array:
        """Join the ranks' parts along the last axis, in rank order."""
        return self.gather(part, joined=True)

    def gather(self, x: Array, joined: bool = False) -> Array:
        """Every rank's x: [W, ...], or joined along the last axis."""
        raise NotImplementedError

    def leave(self) -> None:
        """Return when no rank's GPU reads of another any more."""
        self.ops.finish()
        self.group.comm.barrier()

    def abort(self) -> None:
        """End whatever waits for another rank on this GPU; from any thread."""


class PeerComm(CudaComm):
    """Ranks of one machine, which write into each other's memory."""

    def __init__(self, memory: PeerMemory, ops: Any, group: ProcessGroup) -> None:
        super().__init__(group, ops)
        assert memory.peers is not None
        self.memory, self.peers = memory, memory.peers
        self.link, self.faults = self.peers.link, self.peers.fault
        self._gather = gather_over(self.peers, ops)

    def judge(self, faults: np.ndarray | None) -> None:
        if faults is None or not faults.any():
            return
        if self.group.failure is not None:
            raise self.group.lost()
        raise RankError(self.peers.meaning(int(faults[0])))

    def all_reduce(self, partial: Array) -> Array:
        """Sum [T,H] over ranks, in rank order, in float32, rounded once; in place."""
        self.traffic.count(partial)
        return all_reduce(partial, self.peers, out=partial)

    def gather(self, x: Array, joined: bool = False) -> Array:
        self.traffic.count(x)
        return self._gather(x, joined)

    def abort(self) -> None:
        self.memory.abort()


class NcclComm(CudaComm):
    """Ranks of any machines."""

    def __init__(self, group: ProcessGroup, ops: Any, fast: bool) -> None:
        super().__init__(group, ops)
        os.environ.update(NCCL_ENVIRONMENT)
        from cupy.cuda import nccl

        if not nccl.available:
            raise ImportError("NCCL is not installed: pip install nvidia-nccl-cu13")
        self.nccl, self.fast = nccl, fast
        self.link = "nccl's own sum" if fast else "nccl"
        name = group.comm.broadcast(nccl.get_unique_id() if group.rank == 0 else b"")
        self.ranks = nccl.NcclCommunicator(self.world, name, self.rank)
        # Its end would wait for graphs that hold it: it ends with the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.ranks))

    def all_reduce(self, partial: Array) -> Array:
        """Sum [T,H] over ranks; in rank order, in float32, rounded once, if not `fast`."""
        if not self.fast:
            return sum_gathered(self.gather(partial), out=partial)
        self.traffic.count(partial)
        kind, how = self.nccl.NCCL_BFLOAT16, self.nccl.NCCL_SUM
        to = partial.data.ptr, partial.data.ptr
        self.ranks.allReduce(*to, partial.size, kind, how, self.ops.stream.ptr)
        return partial

    def gather(self, x: Array, joined: bool = False) -> Array:
        self.traffic.count(x)
        out = self.ops.empty((self.world, *x.shape), x.dtype)
        kind, stream = self.nccl.NCCL_INT8, self.ops.stream.ptr
        self.ranks.allGather(x.data.ptr, out.data.ptr, x.nbytes, kind, stream)
        return along_rows(out) if joined else out

    def wait(self, done: Any) -> None:
        """As long as ranks wait for each other: NCCL itself knows no end."""
        seconds = self.group.place.seconds
        end = time.monotonic() + seconds
        while not done.done:
            if time.monotonic() > end:
                raise RankError(f"a round has not ended within {seconds:g} s: a rank has stopped")
            time.sleep(POLL)

    def judge(self, faults: np.ndarray | None) -> None:
        """What calls have left that `abort` ended is no result."""
        if self.group.failure is not None:
            raise self.group.lost()

    def abort(self) -> None:
        def end() -> None:  # comes back only when no graph holds the communicator any more
            with self.ops.xp.cuda.Device(self.ops.index):
                self.ranks.abort()

        threading.Thread(target=end, daemon=True).start()
