"""What one rank measures of the group's exchanges; `gpu_processes.py` starts the ranks.

A time is the device's, of a replayed graph of many calls, replays in a row: the ranks keep step by
the calls themselves, and what the host does in between is not seen. The slowest rank's counts.
"""

import dataclasses
import time
from statistics import median
from typing import Any

import cupy
import numpy as np

from bench.gpu_processes import Group
from bench.soak import Soak
from ddtree_numba.kernels import all_gather
from ddtree_numba.kernels.all_reduce import METHODS, all_reduce, choose
from ddtree_numba.kernels.all_reduce_gathered import sum_gathered
from ddtree_numba.kernels.driver import DeviceError
from ddtree_numba.kernels.peers import Peers, Room
from ddtree_numba.kernels.rms_norm import rms_norm
from ddtree_numba.model.peer_memory import PeerMemory, connect, self_test
from ddtree_numba.spec.numerics import BF16

ROWS = (1, 9, 17, 33, 65, 512)
WIDTH = 7168
CALLS, REPLAYS, WARM = 100, 15, 5
VOCABULARY = 163_840
# Rows and 32-bit words of what is gathered: keys of tokens, candidates of eight positions, logits.
GATHERED = {
    "16 keys": (16, 2),
    "8 x 32 candidates": (8, 66),
    "logits": (1, None),
    "17 of them": (17, None),
}
ROUND, ROUND_ROWS = 122, (1, 9, 17)  # all-reduces of a forward pass, with a norm behind each
SOAK_ROWS = ((1, 9, 17), (33, 65))
STOPPED_LIMIT = 400_000_000  # ns
NCCL, NCCL_GATHER, NCCL_STACKED = "NCCL all-reduce", "NCCL all-gather, sum", "NCCL, stacked"


class Rank:
    """One process with its GPU."""

    def __init__(self, group: Group, options: Any) -> None:
        self.group, self.options = group, options
        self.rank, self.world = group.rank, group.world
        cupy.cuda.Device(self.rank).use()
        largest = max(ROWS) * WIDTH * 2
        self.room = Room.of(self.world, 65 * WIDTH * 2, largest, largest)
        self.memory = PeerMemory(self.rank, self.world, self.room)
        self.memory.join_processes(group.gather)
        self.peers, self.stream = self.memory.peers, self.memory.stream
        self.arrays: dict[int, Any] = {}

    def barrier(self) -> None:
        self.stream.synchronize()
        self.group.gather(b"")

    def payload(self, rows: int) -> tuple[Any, Any]:
        if rows not in self.arrays:
            with self.stream:
                x = cupy.zeros((rows, WIDTH), BF16)
                self.arrays[rows] = x, cupy.zeros_like(x)
        return self.arrays[rows]

    def ordered(self, method: str | None, peers: Peers | None = None) -> Any:
        def call(x: Any, out: Any) -> None:
            all_reduce(x, peers or self.peers, out=out, method=method, stream=self.stream)

        return call

    def nccl(self) -> dict[str, Any]:
        """NCCL's own all-reduce, and its all-gather with the ordered sum behind."""
        from cupy.cuda import nccl

        name = nccl.get_unique_id() if self.rank == 0 else b""
        name = self.group.gather(name)[0]
        communicator = self.nccl_communicator = nccl.NcclCommunicator(self.world, name, self.rank)
        kind = nccl.NCCL_BFLOAT16
        with self.stream:
            gathered = cupy.zeros((self.world, max(ROWS), WIDTH), BF16)

        def own(x: Any, out: Any) -> None:
            to = x.data.ptr, out.data.ptr
            communicator.allReduce(*to, x.size, kind, nccl.NCCL_SUM, self.stream.ptr)

        def ordered(x: Any, out: Any) -> None:
            parts = gathered.reshape(-1)[: self.world * x.size].reshape(self.world, *x.shape)
            communicator.allGather(x.data.ptr, parts.data.ptr, x.size, kind, self.stream.ptr)
            sum_gathered(parts, out=out, stream=self.stream)

        return {NCCL_GATHER: ordered, NCCL: own}

    def seconds(self, work: Any) -> float:
        """Device time of the captured work: median of replays in a row, the slowest rank's."""
        with self.stream:
            work()
            self.barrier()
            self.stream.begin_capture()
            work()
            graph = self.stream.end_capture()
        graph.upload(self.stream)
        events = [cupy.cuda.Event() for _ in range(REPLAYS + 1)]
        self.barrier()
        for number in range(WARM + REPLAYS):
            if number >= WARM:
                events[number - WARM].record(self.stream)
            graph.launch(self.stream)
        events[-1].record(self.stream)
        self.barrier()
        elapsed = cupy.cuda.get_elapsed_time
        mine = median(elapsed(a, b) / 1e3 for a, b in zip(events, events[1:], strict=False))
        return self.group.slowest(mine)

    def times(self, call: Any, payloads: dict | None = None) -> dict[Any, float]:
        """us a call, by rows, or by payload."""
        found = {}
        for rows, (x, out) in (payloads or {rows: self.payload(rows) for rows in ROWS}).items():

            def work(x=x, out=out) -> None:
                for _ in range(CALLS):
                    call(x, out)

            found[rows] = self.seconds(work) / CALLS * 1e6
        return found

    def gathers(self) -> dict[str, dict]:
        """us by each method, logits joined along rows; of NCCL, which stacks them as well."""
        from cupy.cuda import nccl

        payloads = {}
        for name, (rows, words) in GATHERED.items():
            width = words or VOCABULARY // self.world
            with self.stream:
                x = cupy.zeros((rows, width), np.uint32)
                shape = (self.world, rows, width) if words else (rows, self.world * width)
                payloads[name] = x, cupy.zeros(shape, np.uint32)

        def ordered(method: str) -> Any:
            def call(x: Any, out: Any) -> None:
                all_gather.all_gather(x, self.peers, out=out, method=method, stream=self.stream)

            return call

        def stacked(x: Any, out: Any) -> None:
            to = x.data.ptr, out.data.ptr
            self.nccl_communicator.allGather(*to, x.size, nccl.NCCL_UINT32, self.stream.ptr)

        calls = {method: ordered(method) for method in all_gather.METHODS}
        calls[NCCL_STACKED] = stacked
        return {name: self.times(call, payloads) for name, call in calls.items()}

    def rounds(self, call: Any | None) -> dict[int, float]:
        """us of 122 norms with the residual, an all-reduce ahead of each."""
        found = {}
        for rows in ROUND_ROWS:
            x, out = self.payload(rows)
            total = cupy.zeros_like(x)
            weight = cupy.zeros(WIDTH, BF16)

            def work(x=x, out=out, total=total, weight=weight) -> None:
                for _ in range(ROUND):
                    if call:
                        call(x, out)
                    rms_norm(out, weight, 1e-5, total, out=(x, total), stream=self.stream)

            found[rows] = self.seconds(work) * 1e6
        return found

    def soak(self) -> dict:
        parts = [Soak(self.memory, rows) for rows in SOAK_ROWS]
        for part in parts:
            part.run()
            self.barrier()
            part.capture()
        self.barrier()
        start, calls = time.perf_counter(), 0
        while calls < self.options.soak:
            for _ in range(50):
                for part in parts:
                    part.replay()
                    calls += len(part.steps)
            self.barrier()
        seconds = time.perf_counter() - start
        results = [part.result() for part in parts]
        summed = {key: sum(r[key] for r in results) for key in results[0] if key != "failure"}
        failure = next((r["failure"] for r in results if r["failure"]), None)
        return dict(rank=self.rank, **summed, failure=failure, seconds=seconds)

    def stopped(self) -> dict:
        """The last rank comes to no further call: how long until the others' streams are free."""
        self.barrier()
        if self.rank == self.world - 1:
            self.group.gather(b"")
            return {}
        self.peers = dataclasses.replace(self.peers, limit=STOPPED_LIMIT)
        x, out = self.payload(17)
        call = self.ordered(None)
        start = time.perf_counter()
        for _ in range(10):
            call(x, out)
        self.stream.synchronize()
        seconds = time.perf_counter() - start
        self.group.gather(b"")
        return dict(limit=STOPPED_LIMIT / 1e9, seconds=seconds, failure=self.peers.failure())

    def host_memory(self) -> dict[str, dict]:
        """Times of all methods in pinned host memory, as between GPUs without peer access."""
        try:
            memory, _ = connect(self.rank, self.world, self.room, self.group.gather, ["host"])
        except DeviceError as error:
            print(error)
            return {}
        named = {f"{method}, host memory": method for method in METHODS}
        return {name: self.times(self.ordered(m, memory.peers)) for name, m in named.items()}

    def all(self) -> dict:
        self.barrier()
        result: dict[str, Any] = dict(self_test=self_test([self.memory]))
        self.barrier()
        calls = {method: self.ordered(method) for method in METHODS} | self.nccl()
        result["us"] = {name: self.times(call) for name, call in calls.items()}
        result["us"] |= self.host_memory()
        result["gather_us"] = self.gathers()
        result["chosen"] = {rows: choose(self.world, 2 * rows * WIDTH) for rows in ROWS}
        named = {"norms alone": None, "ordered": self.ordered(None), NCCL: calls[NCCL]}
        result["round_us"] = {name: self.rounds(call) for name, call in named.items()}
        result["soak"] = self.soak()
        result["stopped"] = self.stopped()
        return result


def nccl_version() -> str:
    from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError("NCCL is not installed: pip install nvidia-nccl-cu13")
    version = nccl.get_version()
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
