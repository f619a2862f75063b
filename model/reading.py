"""Parts of files into arrays: neighbours in one read, several reads at once, a few arrays ahead.

Disks are at their best when several reads wait for them, also while an array is put where it lives.
Memory is bounded: the array being placed, AHEAD bytes or one array that is being filled, and a
scratch buffer of BLOCK bytes a thread.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.model.fields import CheckpointError

THREADS = min(16, 2 * len(os.sched_getaffinity(0)))
BLOCK = 1 << 22  # bytes, at most, of one read
GAP = 1 << 16  # bytes that are read and dropped rather than skipped
AHEAD = 1 << 29  # bytes of arrays that are filled before they are asked for
REPORT_SECONDS = 0.2

Task = Callable[[], int]  # does a part of the work -> how many bytes of it


class Files:
    """Files that are opened once, when first asked for, until `close` or the end of this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, int] = {}
        self.close = weakref.finalize(self, _close, self._open)

    def descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                # What lies behind a slice is another rank's: reading it ahead is for nothing.
                os.posix_fadvise(self._open[path], 0, 0, os.POSIX_FADV_RANDOM)
            return self._open[path]

    def read(self, path: Path, start: int, out: np.ndarray) -> None:
        """Fill `out`, contiguous, with the bytes from `start` on."""
        left = out.view(np.uint8).reshape(-1).data
        descriptor = self.descriptor(path)
        while left:
            try:
                count = os.preadv(descriptor, [left], start)
            except OSError as error:
                raise CheckpointError(f"{path}: byte {start}: {error.strerror}") from None
            if not count:
                raise CheckpointError(f"{path}: ends at byte {start} while it is being read")
            left, start = left[count:], start + count


def _close(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


class Part(NamedTuple):
    """Rows of a stored matrix, of which `columns` go to `out` [rows, columns]; 2-D and integers."""

    path: Path
    start: int
    width: int  # stored columns
    columns: slice
    out: np.ndarray

    @property
    def stop(self) -> int:
        return self.start + len(self.out) * self.width * self.out.itemsize

    @property
    def direct(self) -> bool:
        return self.out.shape[1] == self.width and self.out.flags.c_contiguous

    def cut(self) -> Iterator["Part"]:
        """In parts of BLOCK bytes, or one row."""
        step = max(1, BLOCK // max(1, self.width * self.out.itemsize))
        for row in range(0, len(self.out), step):
            start = self.start + row * self.width * self.out.itemsize
            yield self._replace(start=start, out=self.out[row : row + step])


def grouped(parts: Iterable[Part]) -> list[list[Part]]:
    """Parts of BLOCK bytes, those together that lie at most GAP apart."""
    groups: list[list[Part]] = []
    pieces = (piece for part in parts for piece in part.cut())
    for part in sorted(pieces, key=lambda piece: piece[:2]):
        group = groups[-1] if groups else None
        if (
            group
            and group[0].path == part.path
            and 0 <= part.start - group[-1].stop <= GAP
            and part.stop - group[0].start <= BLOCK
        ):
            group.append(part)
        else:
            groups.append([part])
    return groups


_scratch = threading.local()


def read_group(files: Files, group: list[Part]) -> int:
    """One read, and its bytes to their places -> bytes that were wanted."""
    first, stop = group[0], group[-1].stop
    if len(group) == 1 and first.direct:
        files.read(first.path, first.start, first.out)
        return first.out.nbytes
    size = stop - first.start
    if getattr(_scratch, "buffer", np.empty(0)).nbytes < size:
        _scratch.buffer = np.empty(max(size, BLOCK), np.uint8)
    buffer = _scratch.buffer[:size]
    files.read(first.path, first.start, buffer)
    for part in group:
        raw = buffer[part.start - first.start : part.stop - first.start]
        part.out[...] = raw.view(part.out.dtype).reshape(-1, part.width)[:, part.columns]
    return sum(part.out.nbytes for part in group)


class Ahead:
    """Values that threads fill in the order of `sizes`, name -> bytes, in which they are taken.

    begin(name) -> (value, tasks): the value is complete when all tasks are done.
    progress(done, total) is called from the thread that takes, every REPORT_SECONDS at least while
    it waits; `done` adds up what tasks return.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        begin: Callable[[str], tuple[Any, list[Task]]],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._left, self._sizes, self._begin = deque(sizes), sizes, begin
        self._begun: deque[tuple[str, Any, list[Future]]] = deque()
        self._waiting = self._done = 0
        self._total, self._progress = sum(sizes.values()), progress
        self._pool = ThreadPoolExecutor(THREADS, "read")

    def take(self, name: str) -> Any:
        """The next value; an error of one of its tasks is raised here."""
        self._fill()
        expected, value, futures = self._begun.popleft()
        if name != expected:
            raise AssertionError(f"{name} is taken when {expected} is next")
        self._waiting -= self._sizes[name]
        self._fill()
        left: set[Future] = set(futures)
        while left:
            done, left = wait(left, REPORT_SECONDS)
            self._done += sum(future.result() for future in done)
            if self._progress is not None:
                self._progress(self._done, self._total)
        return value

    def _fill(self) -> None:
        while self._left:
            size = self._sizes[self._left[0]]
            if self._begun and self._waiting + size > AHEAD:
                return
            name = self._left.popleft()
            value, tasks = self._begin(name)
            self._begun.append((name, value, [self._pool.submit(task) for task in tasks]))
            self._waiting += size

    def close(self) -> None:
        """Give up what was not taken."""
        self._pool.shutdown(cancel_futures=True)

    def finish(self) -> None:
        """Every value was taken."""
        left = [*(name for name, *_ in self._begun), *self._left]
        if left:
            raise AssertionError(f"values that nobody took: {left[:4]}")
