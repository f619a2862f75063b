"""Sums and gathers over tensor-parallel ranks: one rank, or threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ddtree_numba.spec.all_reduce import all_reduce


@dataclass
class Traffic:
    """What one rank has given: calls, and bytes of payload, whatever the transport adds."""

    calls: int = 0
    bytes: int = 0

    def count(self, payload: np.ndarray) -> None:
        self.calls += 1
        self.bytes += payload.nbytes

    def add(self, now: "Traffic", before: "Traffic") -> None:
        """What came between two looks at another count."""
        self.calls += now.calls - before.calls
        self.bytes += now.bytes - before.bytes


class Comm(Protocol):
    """What the model asks of its ranks; every rank calls the same methods in the same order.

    `faults` are words on the device, not 0 if a call there ended without its result, and None where
    every call ends with its result or an error. `link` is what calls go over.
    """

    rank: int
    world: int
    link: str
    traffic: Traffic
    faults: Any

    def all_reduce(self, partial: np.ndarray) -> np.ndarray:
        """Sum [T,H] over ranks, in rank order, in float32, rounded once."""

    def all_gather(self, part: np.ndarray) -> np.ndarray:
        """Join the ranks' parts along the last axis, in rank order."""

    def judge(self, faults: np.ndarray | None) -> None:
        """Raise an error if these words, once on the device, tell of one."""

    def wait(self, done: Any) -> None:
        """Until a point of the device's work is reached."""
        done.synchronize()


class Sound(Comm):
    """No call of a rank ends without its result."""

    faults, link = None, "host"

    def judge(self, faults: np.ndarray | None) -> None:
        pass


class SingleRank(Sound):
    """A world of one: nothing to add, nothing to gather."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.traffic = Traffic()  # stays empty

    def all_reduce(self, partial: np.ndarray) -> np.ndarray:
        return partial

    def all_gather(self, part: np.ndarray) -> np.ndarray:
        return part


class ThreadGroup:
    """Ranks as threads of one process: runs a function on every rank and lets their calls meet."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.comms = [ThreadComm(self, rank) for rank in range(world)]
        self._slots: list[Any] = [None] * world
        self._barrier = threading.Barrier(world)
        self._pool = ThreadPoolExecutor(world, thread_name_prefix="rank")

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()  # nobody overwrites a slot before all have read it
        return values

    def run(self, work: Callable[[int], object]) -> list:
        """work(rank) on every rank at once; the first failure is raised and frees the others."""
        return self._together(work, here=False)

    def _together(self, work: Callable[[int], object], here: bool) -> list:
        """`run`; rank 0 is the calling thread if `here`."""

        def guarded(rank: int) -> tuple[object, BaseException | None]:
            try:
                return work(rank), None
            except BaseException as error:
                self._barrier.abort()
                return None, error

        futures = [self._pool.submit(guarded, rank) for rank in range(int(here), self.world)]
        ends = [guarded(0)] if here else []
        ends += [future.result() for future in futures]
        errors = [error for _, error in ends if error is not None]
        if errors:
            self._barrier.reset()
            own = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
            raise (own or errors)[0]
        return [result for result, _ in ends]


class ThreadComm(Sound):
    """One rank of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.world = group, rank, group.world
        self.traffic = Traffic()

    def all_reduce(self, partial: np.ndarray) -> np.ndarray:
        self.traffic.count(partial)
        return all_reduce(np.stack(self.group.exchange(self.rank, partial)))

    def all_gather(self, part: np.ndarray) -> np.ndarray:
        self.traffic.count(part)
        return np.concatenate(self.group.exchange(self.rank, part), axis=-1)
