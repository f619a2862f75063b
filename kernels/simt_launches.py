"""Dependent launch on the CPU executor: what a kernel touches ahead of its wait must be complete.

The rule is that of `pdl` in `launch.py`. A kernel is settled here if a thread of it waits for the
kernel ahead, and none lets the next one start before its own wait (a block's first call counts for
the block): when the next one starts, all kernels before the settled one have ended. The settled one
may not have, nor any that follows it.

    with watched():
        ...  # launches on numpy arrays, in the order of a stream

raises a `Fault` at the first launch that touches ahead of its wait what may not be there yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ddtree_numba.kernels.simt_threads import Fault

Places = list[tuple[str, np.ndarray]]  # parameter, addresses of its bytes


class Watch:
    """The launches of each stream that a later one may overlap."""

    def __init__(self) -> None:
        self.stream = ""  # of the launches that follow
        self.open: dict[str, list[tuple[str, Places]]] = {}  # kernels, and what they wrote

    def join(self, other: str) -> None:
        """The stream waits for another one: what is open there is open here as well."""
        self.open.setdefault(self.stream, []).extend(self.open.get(other, []))

    def add(self, launch: Any) -> None:
        before = self.open.setdefault(self.stream, [])
        if launch.dependent:
            touched = _places(launch, "ahead")
            for earlier, written in before:
                _refuse(launch.name, touched, earlier, written)
        settled = launch.waited and not launch.early
        if settled or not launch.dependent:
            before.clear()
        before.append((launch.name, _places(launch, "written")))


def _places(launch: Any, marks: str) -> Places:
    """Bytes that a launch has marked so."""
    found = []
    for memory in launch.memories:
        marked = np.flatnonzero(np.frombuffer(getattr(memory, marks), np.uint8))
        if len(marked):
            found.append((memory.name, memory.array.ctypes.data + marked))
    return found


def _refuse(later: str, touched: Places, earlier: str, written: Places) -> None:
    for name, ours in touched:
        for other, theirs in written:
            if len(np.intersect1d(ours, theirs)):
                raise Fault(
                    f"{later} touches {name} ahead of its wait, which {earlier} writes as {other}: "
                    "that may not have ended"
                )


_watches: list[Watch] = []


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch the launches inside; `stream` of what it yields says whose they are."""
    _watches.append(Watch())
    try:
        yield _watches[-1]
    finally:
        _watches.pop()


@contextmanager
def seen(launch: Any) -> Iterator[None]:
    """Around a launch."""
    if not _watches:
        yield
        return
    for memory in launch.memories:
        size = len(memory.bytes)
        memory.ahead, memory.written = bytearray(size), bytearray(size)
    yield
    _watches[-1].add(launch)
