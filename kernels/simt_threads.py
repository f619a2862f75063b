"""Threads, warps and blocks of the CPU executor: one greenlet a thread, which runs until it meets.

A warp operation ends when all lanes of its mask have come to the same call; a barrier when all its
threads have. Between them lanes and warps run one after another, in an order that a seed shuffles.
Every warp counts synchronisations in a vector clock; shared memory compares clocks to see whether a
barrier orders two accesses or they merely happened to come in that order.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

from greenlet import getcurrent, greenlet

WARP = 32
FULL = 0xFFFFFFFF
PATIENCE = 1000  # rounds in which every thread left does nothing but look at memory


class Fault(RuntimeError):
    """What a GPU would do wrong without a word; names kernel, line, block and thread."""


class Stamp(NamedTuple):
    """Who accessed memory, and when by the clock of its warp. Thread -1: several of the warp."""

    thread: int
    warp: int
    clock: int
    atomic: bool = False


class Site(NamedTuple):
    """A place in the kernel's code."""

    code: CodeType | None = None
    instruction: int = 0
    line: int = 0

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.line}" if self.code else "?"


class Meeting(NamedTuple):
    """What a thread waits for: lanes of a mask, `count` threads at a barrier, or another look."""

    kind: str
    site: Site = Site()
    given: Any = None
    combine: Callable[[list], list] | None = None
    mask: int = 0
    barrier: int = 0
    count: int = 0


RUNNING = Meeting("running")

now = SimpleNamespace(thread=None, block=None, scheduler=None)


@dataclass(eq=False)
class Thread:
    index: int
    position: SimpleNamespace  # x, y, z
    warp: "Warp"
    block: "Block"
    run: greenlet
    stamp: Stamp
    waits: Meeting = RUNNING
    result: Any = None
    open_copies: list = field(default_factory=list)
    copy_groups: list = field(default_factory=list)
    waited: bool = False  # for the kernel ahead

    @property
    def lane(self) -> int:
        return self.index % WARP


@dataclass(eq=False)
class Warp:
    index: int
    clock: list[int]  # clock[w]: synchronisations of warp w that this warp knows of
    threads: list[Thread] = field(default_factory=list)

    def tick(self) -> None:
        """What comes from now on is later than all that this warp has done."""
        self.clock[self.index] += 1
        for thread in self.threads:
            thread.stamp = Stamp(thread.index, self.index, self.clock[self.index])


def site(depth: int) -> Site:
    frame = sys._getframe(depth + 1)
    return Site(frame.f_code, frame.f_lasti, frame.f_lineno)


def wait(meeting: Meeting) -> Any:
    thread = now.thread
    thread.waits = meeting
    now.scheduler.switch()
    return thread.result


def meet(combine: Callable[[list], list], given: Any, mask: int = FULL, depth: int = 2) -> Any:
    """Wait for the lanes of `mask`; combine(what they gave, by lane) is what they get, by lane."""
    return wait(Meeting("lanes", site(depth), given, combine, mask & FULL))


def barrier(number: int, count: int, given: Any = None, depth: int = 2) -> list:
    """Wait for `count` threads at barrier `number`; returns what all of them gave."""
    return wait(Meeting("barrier", site(depth), given, barrier=number, count=count))


def look_again(depth: int = 2) -> None:
    """Let others run: a thread that polls memory calls this before each look."""
    wait(Meeting("poll", site(depth)))


def order_lanes(given: list) -> list:
    """The meeting of __syncwarp: nothing but an order of memory accesses."""
    return given


class Block:
    """One block at work."""

    def __init__(self, launch: Any, position: SimpleNamespace, shared: Any):
        self.launch, self.position, self.shared = launch, position, shared
        shape = launch.shape
        self.arrays: dict[tuple, Any] = {}  # shared arrays by the call that made them
        size = shape.x * shape.y * shape.z
        count = -(-size // WARP)
        self.warps = [Warp(i, [0] * count) for i in range(count)]
        self.threads = []
        for i in range(size):
            x, y, z = i % shape.x, i // shape.x % shape.y, i // (shape.x * shape.y)
            warp = self.warps[i // WARP]
            where = SimpleNamespace(x=x, y=y, z=z)
            thread = Thread(i, where, warp, self, greenlet(launch.body), Stamp(i, warp.index, 0))
            warp.threads.append(thread)
            self.threads.append(thread)
        self.ready = list(self.threads)

    def advance(self, enter: Callable[[Thread], None]) -> bool:
        """Run until the block has ended (True) or all that could run polls memory (False)."""
        while self.ready:
            before, self.ready = self.ready, []
            for warp in self.launch.in_turn(self.warps):
                mine = [thread for thread in before if thread.warp is warp]
                self.ready += self._run_warp(warp, mine, enter)
            self.ready += self._open_barriers()
            if self.ready and all(thread.waits.kind == "poll" for thread in self.ready):
                return False
        left = [thread for thread in self.threads if not thread.run.dead]
        if left:
            lines = sorted({thread.waits.site.line for thread in left})
            ended = len(self.threads) - len(left)
            message = f"deadlock: {len(left)} threads wait in lines {lines}, {ended} have returned"
            raise self.fault(left[0], message)
        return True

    def _run_warp(self, warp: Warp, ready: list[Thread], enter) -> list[Thread]:
        """Run lanes and settle their meetings until all wait for the block; returns the pollers."""
        polling: list[Thread] = []
        while ready:
            for thread in self.launch.in_turn(ready):
                thread.waits = RUNNING
                enter(thread)
                thread.run.switch()
            polling += [thread for thread in ready if thread.waits.kind == "poll"]
            ready = self._settle(warp)
        return polling

    def _settle(self, warp: Warp) -> list[Thread]:
        """Perform the warp operations whose lanes have all arrived."""
        ready: list[Thread] = []
        for first in warp.threads:
            wanted = first.waits
            if wanted.kind != "lanes":
                continue
            present = (1 << len(warp.threads)) - 1
            group = [thread for thread in warp.threads if wanted.mask >> thread.lane & 1]
            if first not in group:
                raise self.fault(first, f"its lane is missing in mask {wanted.mask:#x}")
            if any(thread.waits.kind == "poll" for thread in group):
                continue
            self._check_convergence(first, group)
            if wanted.mask & ~present and wanted.mask != FULL:
                raise self.fault(first, f"mask {wanted.mask:#x} names lanes that do not exist")
            given: list = [None] * WARP
            for thread in group:
                given[thread.lane] = thread.waits.given
            results = wanted.combine(given)  # type: ignore[misc]
            if wanted.combine is order_lanes:
                warp.tick()
            for thread in group:
                thread.result, thread.waits = results[thread.lane], RUNNING
            ready += group
        return ready

    def _check_convergence(self, first: Thread, group: list[Thread]) -> None:
        wanted = first.waits
        for thread in group:
            other = thread.waits
            if thread.run.dead:
                where = "has returned"
            elif other.kind == "barrier":
                where = f"waits at the barrier of line {other.site.line}"
            elif other.site != wanted.site or other.combine is not wanted.combine:
                where = f"is in line {other.site.line}"
            elif other.mask != wanted.mask:
                where = f"names the lanes {other.mask:#x}, not {wanted.mask:#x}"
            else:
                continue
            raise self.fault(first, f"divergent warp operation: lane {thread.lane} {where}")

    def _open_barriers(self) -> list[Thread]:
        waiting: dict[int, list[Thread]] = {}
        for thread in self.threads:
            if thread.waits.kind == "barrier":
                waiting.setdefault(thread.waits.barrier, []).append(thread)
        ready: list[Thread] = []
        for number, group in waiting.items():
            first = group[0].waits
            for thread in group:
                other = thread.waits
                if other.count != first.count or (number == 0 and other.site != first.site):
                    where = f"thread {thread.index} waits in line {other.site.line}"
                    raise self.fault(group[0], f"divergent barrier: {where}")
            if len(group) == first.count:
                given = [thread.waits.given for thread in group]
                self._synchronise({thread.warp.index for thread in group})
                for thread in group:
                    thread.result, thread.waits = given, RUNNING
                ready += group
        return ready

    def _synchronise(self, members: set[int]) -> None:
        """All members know what each of them has done so far."""
        warps = [self.warps[i] for i in members]
        known = [max(column) for column in zip(*(warp.clock for warp in warps), strict=True)]
        for warp in warps:
            warp.clock = [count + (i in members) for i, count in enumerate(known)]
            warp.clock[warp.index] -= 1
            warp.tick()

    def fault(self, thread: Thread, message: str, place: str = "") -> Fault:
        """A fault of `thread`, by default where it waits."""
        x, y, z = self.position.x, self.position.y, self.position.z
        place = place or str(thread.waits.site)
        where = f"{self.launch.name}, {place}, block ({x}, {y}, {z}), thread {thread.index}"
        return Fault(f"{where}: {message}")


def run_blocks(pending: Iterator[Block], enter: Callable[[Thread], None]) -> None:
    """Blocks one after another; a further one joins in only while all others poll memory."""
    resident: list[Block] = []
    rounds = 0
    now.scheduler = getcurrent()
    while True:
        polling = [block for block in resident if not block.advance(enter)]
        fresh = next(pending, None)
        rounds = rounds + 1 if fresh is None and len(polling) == len(resident) else 0
        resident = polling if fresh is None else [*polling, fresh]
        if not resident:
            return
        if rounds > PATIENCE:
            stuck = resident[0]
            raise stuck.fault(stuck.ready[0], "polls memory that nobody writes any more")
