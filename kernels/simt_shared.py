"""Shared memory of one block on the CPU executor, and its hazards.

Each byte knows who wrote it last and who has read it since. A fault, whatever order the threads
happened to run in: reading what nobody wrote, what an asynchronous copy has yet to deliver, or what
another thread wrote with no barrier between; writing what another thread wrote or read with no
barrier between. Lanes of one warp need __syncwarp.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.kernels.simt_memory import decoded, encoded, flat_index
from ddtree_numba.kernels.simt_threads import Fault, Stamp, now

POISON = 0xCD


class Copying(NamedTuple):
    """Mark of bytes that a copy is on its way to."""

    thread: int


class Several(tuple):
    """Stamps of accesses that no barrier orders, one a warp."""


def precedes(earlier: Stamp | Several | None, atomic: bool = False) -> bool:
    """Whether the running thread certainly comes after that access, or both are atomic."""
    thread = now.thread
    if earlier is None or earlier is thread.stamp:
        return True
    if isinstance(earlier, Several):
        return all(precedes(each, atomic) for each in earlier)
    if earlier.thread == thread.index or (atomic and earlier.atomic):
        return True
    return thread.warp.clock[earlier.warp] > earlier.clock


def joined(earlier: Stamp | Several | None, mine: Stamp) -> Stamp | Several:
    """Both accesses, without those that a barrier orders before mine."""
    if earlier is None or earlier is mine:
        return mine
    stamps = earlier if isinstance(earlier, Several) else (earlier,)
    if any(each.warp == mine.warp and each[1:] == mine[1:] for each in stamps):
        mine = mine if mine in stamps else mine._replace(thread=-1)
    others = [each for each in stamps if each.warp != mine.warp and not precedes(each)]
    return Several([*others, mine]) if others else mine


def _each_once(readers: list, mine: Stamp) -> list:
    """`joined` for every byte; neighbours mostly share their readers."""
    result, previous, now_read_by = [], object(), None
    for reader in readers:
        if reader is not previous:
            previous, now_read_by = reader, joined(reader, mine)
        result.append(now_read_by)
    return result


class SharedMemory:
    """Bytes with their history: the dynamic part from byte 0, static arrays behind it."""

    def __init__(self, dynamic: int, limit: int):
        self.dynamic, self.limit = dynamic, limit
        self.bytes = bytearray()
        self.writers: list = []
        self.readers: list = []
        self.allocate(dynamic, 16)

    def allocate(self, size: int, alignment: int) -> int:
        start = -(-len(self.bytes) // 16) * 16
        if alignment < 16:  # no better aligned than asked for, so that a vector access shows
            start += alignment
        grow = start + size - len(self.bytes)
        if start + size > self.limit:
            raise Fault(f"{start + size} bytes of shared memory, the limit is {self.limit}")
        self.bytes += bytes([POISON]) * grow
        self.writers += [None] * grow
        self.readers += [None] * grow
        return start

    def _range(self, start: int, size: int) -> range:
        if start % size:
            raise Fault(f"misaligned: {size} bytes at byte {start} of shared memory")
        if not 0 <= start <= len(self.bytes) - size:
            have = len(self.bytes)
            raise Fault(f"out of bounds: {size} bytes at byte {start} of {have} of shared memory")
        return range(start, start + size)

    def load(self, start: int, size: int, atomic: bool = False) -> bytes:
        where, end, mine = self._range(start, size), start + size, now.thread.stamp
        previous = None
        for i, writer in zip(where, self.writers[start:end], strict=True):
            if writer is None:
                raise Fault(f"shared byte {i} is read, but nothing has written it")
            if writer is not previous:
                self._check(i, writer, "read", "written", atomic)
                previous = writer
        if not atomic:
            self.readers[start:end] = _each_once(self.readers[start:end], mine)
        return bytes(self.bytes[start:end])

    def store(self, start: int, data: bytes) -> None:
        self._claim(start, len(data), now.thread.stamp)
        self.bytes[start : start + len(data)] = data

    def store_atomic(self, start: int, data: bytes) -> None:
        """The second half of a read-modify-write."""
        mark = now.thread.stamp._replace(atomic=True)
        before = self.writers[start]
        self._claim(start, len(data), mark, atomic=True)
        self.writers[start : start + len(data)] = [joined(before, mark)] * len(data)
        self.bytes[start : start + len(data)] = data

    def begin_copy(self, start: int, size: int) -> None:
        """Nobody may touch the bytes until the thread has waited for its copy."""
        self._claim(start, size, Copying(now.thread.index))

    def end_copy(self, start: int, data: bytes) -> None:
        self.writers[start : start + len(data)] = [now.thread.stamp] * len(data)
        self.bytes[start : start + len(data)] = data

    def _claim(self, start: int, size: int, mark, atomic: bool = False) -> None:
        where, end = self._range(start, size), start + size
        for history, done in ((self.writers, "written"), (self.readers, "read")):
            previous = None
            for i, earlier in zip(where, history[start:end], strict=True):
                if earlier is not None and earlier is not previous:
                    self._check(i, earlier, "written", done, atomic)
                    previous = earlier
        self.writers[start:end] = [mark] * size
        self.readers[start:end] = [None] * size

    def _check(self, i: int, earlier, doing: str, done: str, atomic: bool) -> None:
        if isinstance(earlier, Copying):
            raise Fault(
                f"shared byte {i} is {doing} while the copy of thread {earlier.thread} is under way"
            )
        if not precedes(earlier, atomic):
            stamps = earlier if isinstance(earlier, Several) else (earlier,)
            other = next(each for each in stamps if not precedes(each, atomic))
            who = f"thread {other.thread}" if other.thread >= 0 else f"lanes of warp {other.warp}"
            raise Fault(
                f"race: shared byte {i} is {doing}, and was {done} by {who} with no barrier between"
            )


class SharedArray:
    """cuda.shared.array: indexed as numpy does, without negative indices."""

    def __init__(self, memory: SharedMemory, start: int, shape: tuple[int, ...], code: str):
        self.memory, self.start, self.shape, self.code = memory, start, shape, code
        self.dtype = np.dtype(code)
        self.size = self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def byte(self, index: Any) -> int:
        return self.start + flat_index(index, self.shape) * self.size

    def _decode(self, data: bytes) -> Any:
        return decoded(memoryview(data).cast(self.code)[0], self.code)

    def _encode(self, value: Any) -> bytes:
        data = bytearray(self.size)
        memoryview(data).cast(self.code)[0] = encoded(value, self.code)
        return bytes(data)

    def __getitem__(self, index: Any) -> Any:
        return self._decode(self.memory.load(self.byte(index), self.size))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.memory.store(self.byte(index), self._encode(value))

    def change(self, index: Any, update) -> Any:
        """Atomically x[i] = update(x[i]); returns the old value."""
        start = self.byte(index)
        old = self._decode(self.memory.load(start, self.size, atomic=True))
        self.memory.store_atomic(start, self._encode(update(old)))
        return old


def shared_array(memory: SharedMemory, shape: Any, code: str, alignment: int | None) -> SharedArray:
    """A static array, or the dynamic part when the shape is 0."""
    size = np.dtype(code).itemsize
    if shape == 0:
        return SharedArray(memory, 0, (memory.dynamic // size,), code)
    shape = shape if isinstance(shape, tuple) else (shape,)
    start = memory.allocate(math.prod(shape) * size, alignment or size)
    return SharedArray(memory, start, shape, code)
