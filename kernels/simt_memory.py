"""Global and local memory of the CPU executor.

An access outside its array, a misaligned vector, a write through a read-only pointer and a read of
a local element that nothing was assigned to are faults. Integers come out as Python's, float32 as
numpy scalars, bfloat16 as its bits.
"""

import math
from typing import Any

import numpy as np

from ddtree_numba.kernels.simt_threads import Fault, now

MASKS = {"B": 0xFF, "H": 0xFFFF, "I": 0xFFFFFFFF, "Q": (1 << 64) - 1}
MARK = b"\1"
SIGNED_BITS = {"b": 8, "h": 16, "i": 32, "q": 64}


def wrap(value: Any, bits: int) -> int:
    """Two's complement of that width; a float loses its fraction first."""
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


def encoded(value: Any, code: str) -> Any:
    """What a memoryview of that code takes for `value`: wrapped as a register would."""
    if code in MASKS:
        return int(value) & MASKS[code]
    return wrap(value, SIGNED_BITS[code]) if code in SIGNED_BITS else float(value)


def decoded(value: Any, code: str) -> Any:
    return np.float32(value) if code == "f" else value


def window(array: np.ndarray) -> np.ndarray:
    """Flat bytes from the first to the last element, gaps between rows included."""
    steps = zip(array.shape, array.strides, strict=True)
    count = sum((n - 1) * stride for n, stride in steps) // array.itemsize + 1
    flat = np.lib.stride_tricks.as_strided(array, (count,), (array.itemsize,))
    return flat.view(np.uint8)


class Memory:
    """An array as bytes, aligned as it would be on a device."""

    def __init__(self, name: str, array: np.ndarray, writable: bool = True):
        self.name, self.writable, self.array = name, writable, array
        self.bytes = memoryview(window(array)) if array.size else memoryview(bytearray())
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        # A device aligns allocations to 256 bytes; a view of one may start anywhere.
        self.skew = array.ctypes.data - root.ctypes.data
        self.ahead: bytearray | None = None  # marks of bytes, while launches are watched
        self.written: bytearray | None = None

    def check(self, start: int, size: int) -> None:
        if (start + self.skew) % size:
            raise Fault(f"misaligned: {size} bytes at byte {start + self.skew} of {self.name}")
        if not 0 <= start <= len(self.bytes) - size:
            raise Fault(
                f"out of bounds: {size} bytes at byte {start} of {self.name}, "
                f"which has {len(self.bytes)}"
            )

    def touched(self, start: int, size: int, written: bool = False) -> None:
        """While launches are watched: mark what comes ahead of a thread's wait, what it writes."""
        if self.ahead is not None and not now.thread.waited:
            self.ahead[start : start + size] = MARK * size
        if self.written is not None and written:
            self.written[start : start + size] = MARK * size

    def load(self, start: int, size: int) -> bytes:
        self.check(start, size)
        self.touched(start, size)
        return bytes(self.bytes[start : start + size])

    def store(self, start: int, data: bytes) -> None:
        self.check(start, len(data))
        self.check_writable()
        self.touched(start, len(data), written=True)
        self.bytes[start : start + len(data)] = data

    def check_writable(self) -> None:
        if not self.writable:
            raise Fault(f"write to {self.name}, which the kernel declares as read-only")


class Pointer:
    """A typed pointer: x[i] reads and writes element i; `at` moves it."""

    __slots__ = ("memory", "code", "size", "start", "view")

    def __init__(self, memory: Memory, code: str, start: int = 0, view: memoryview | None = None):
        self.memory, self.code, self.start = memory, code, start
        self.view = memory.bytes.cast(code) if view is None else view
        self.size = self.view.itemsize

    def at(self, index: int) -> "Pointer":
        return Pointer(self.memory, self.code, self.start + int(index), self.view)

    def byte(self, index: int) -> int:
        """Offset of an element in its memory."""
        return (self.start + int(index)) * self.size

    def inside(self, index: int) -> int:
        index = self.start + int(index)
        if not 0 <= index < len(self.view):
            name, count = self.memory.name, len(self.view)
            raise Fault(f"out of bounds: element {index} of {name}, which has {count}")
        return index

    def __getitem__(self, index: int) -> Any:
        index = self.inside(index)
        self.memory.touched(index * self.size, self.size)
        return decoded(self.view[index], self.code)

    def __setitem__(self, index: int, value: Any) -> None:
        index = self.inside(index)
        self.memory.check_writable()
        self.memory.touched(index * self.size, self.size, written=True)
        self.view[index] = encoded(value, self.code)


def flat_index(index: Any, shape: tuple[int, ...]) -> int:
    """Position in row-major order; faults outside the shape, also below zero."""
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) != len(shape):
        raise Fault(f"{len(indices)} indices into an array of shape {shape}")
    flat = 0
    for i, n in zip(indices, shape, strict=True):
        if not 0 <= i < n:
            raise Fault(f"out of bounds: index {index} of an array of shape {shape}")
        flat = flat * n + int(i)
    return flat


class LocalArray:
    """cuda.local.array: registers of one thread."""

    def __init__(self, shape: tuple[int, ...], code: str):
        self.shape, self.code = shape, code
        self.values: list = [None] * math.prod(shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        value = self.values[flat_index(index, self.shape)]
        if value is None:
            raise Fault(f"local element {index} is read before it is assigned")
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        value = decoded(encoded(value, self.code), self.code)
        self.values[flat_index(index, self.shape)] = value
