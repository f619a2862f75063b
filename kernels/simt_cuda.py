"""What a kernel sees as `cuda` and `math` on the CPU executor."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba.cuda import types

from ddtree_numba.kernels.arguments import code_of
from ddtree_numba.kernels.simt_memory import LocalArray, Pointer
from ddtree_numba.kernels.simt_shared import SharedArray, shared_array
from ddtree_numba.kernels.simt_threads import WARP, barrier, look_again, meet, now, order_lanes

FULL = 0xFFFFFFFF


class Integer:
    """A cast, int32(x) for example; also the dtype of an array."""

    def __init__(self, bits: int, signed: bool):
        self.code = code_of(np.dtype(f"{'' if signed else 'u'}int{bits}"))
        self.mask, self.sign = (1 << bits) - 1, 1 << (bits - 1) if signed else 0

    def __call__(self, value: Any) -> int:
        value = int(value) & self.mask
        return value - (self.sign << 1) if value & self.sign else value


CASTS: dict[Any, Any] = {
    getattr(types, f"{'' if signed else 'u'}int{bits}"): Integer(bits, signed)
    for bits in (8, 16, 32, 64)
    for signed in (True, False)
} | {types.float32: np.float32, types.float64: np.float64, types.boolean: bool}


def _code(dtype: Any) -> str:
    return dtype.code if isinstance(dtype, Integer) else code_of(np.dtype(dtype))


class Shared:
    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> SharedArray:
        """The same array for every thread that comes to this call."""
        frame, block = sys._getframe(1), now.block
        place = (frame.f_code, frame.f_lasti)
        if place not in block.arrays:
            block.arrays[place] = shared_array(block.shared, shape, _code(dtype), alignment)
        return block.arrays[place]


class Local:
    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> LocalArray:
        return LocalArray(shape if isinstance(shape, tuple) else (shape,), _code(dtype))


def _change(x: SharedArray | Pointer, index: Any, update) -> Any:
    if isinstance(x, SharedArray):
        return x.change(index, update)
    old = x[index]
    x[index] = update(old)
    return old


class Atomic:
    @staticmethod
    def add(x, index, value):
        return _change(x, index, lambda old: old + value)

    @staticmethod
    def sub(x, index, value):
        return _change(x, index, lambda old: old - value)

    @staticmethod
    def max(x, index, value):
        return _change(x, index, lambda old: max(old, value))

    @staticmethod
    def min(x, index, value):
        return _change(x, index, lambda old: min(old, value))

    @staticmethod
    def and_(x, index, value):
        return _change(x, index, lambda old: old & value)

    @staticmethod
    def or_(x, index, value):
        return _change(x, index, lambda old: old | value)

    @staticmethod
    def exch(x, index, value):
        return _change(x, index, lambda old: value)

    @staticmethod
    def cas(x, index, expected, value):
        return _change(x, index, lambda old: value if old == expected else old)


def _given(values: list) -> list:
    return [value for value in values if value is not None]


def _ballot(values: list) -> list:
    return [sum(1 << lane for lane in range(WARP) if values[lane])] * WARP


def _all(values: list) -> list:
    return [all(_given(values))] * WARP


def _any(values: list) -> list:
    return [any(_given(values))] * WARP


def _match_any(values: list) -> list:
    return [sum(1 << lane for lane in range(WARP) if values[lane] == mine) for mine in values]


def _source(values: list, lane: int, source: int) -> Any:
    """What `source` holds; the own value past the ends. A lane outside the mask has none."""
    chosen = values[source] if 0 <= source < WARP else values[lane]
    return None if chosen is None else chosen[0]


def _shuffle(pick):
    def combine(values: list) -> list:
        return [
            None if mine is None else _source(values, lane, pick(lane, mine[1]))
            for lane, mine in enumerate(values)
        ]

    return combine


_xor = _shuffle(lambda lane, operand: lane ^ operand)
_up = _shuffle(lambda lane, operand: lane - operand)
_down = _shuffle(lambda lane, operand: lane + operand)
_idx = _shuffle(lambda lane, operand: operand % WARP)


class Cuda:
    """Coordinates are set when a thread starts to run."""

    threadIdx: SimpleNamespace
    blockIdx: SimpleNamespace
    blockDim: SimpleNamespace
    gridDim: SimpleNamespace
    laneid: int
    warpsize = WARP
    shared, local, atomic = Shared, Local, Atomic

    def grid(self, dimensions: int) -> Any:
        names = "xyz"[:dimensions]
        at = tuple(
            getattr(self.threadIdx, a) + getattr(self.blockIdx, a) * getattr(self.blockDim, a)
            for a in names
        )
        return at[0] if dimensions == 1 else at

    def gridsize(self, dimensions: int) -> Any:
        size = tuple(
            getattr(self.blockDim, a) * getattr(self.gridDim, a) for a in "xyz"[:dimensions]
        )
        return size[0] if dimensions == 1 else size

    def syncthreads(self) -> None:
        barrier(0, len(now.block.threads))

    def syncthreads_count(self, value) -> int:
        return sum(map(bool, barrier(0, len(now.block.threads), value)))

    def syncthreads_and(self, value) -> int:
        return int(all(barrier(0, len(now.block.threads), value)))

    def syncthreads_or(self, value) -> int:
        return int(any(barrier(0, len(now.block.threads), value)))

    def syncwarp(self, mask=FULL) -> None:
        meet(order_lanes, None, mask)

    def ballot_sync(self, mask, value) -> int:
        return meet(_ballot, bool(value), mask)

    def all_sync(self, mask, value) -> bool:
        return meet(_all, bool(value), mask)

    def any_sync(self, mask, value) -> bool:
        return meet(_any, bool(value), mask)

    def match_any_sync(self, mask, value) -> int:
        return meet(_match_any, value, mask)

    def shfl_sync(self, mask, value, lane):
        return meet(_idx, (value, lane), mask)

    def shfl_xor_sync(self, mask, value, lane_mask):
        return meet(_xor, (value, lane_mask), mask)

    def shfl_up_sync(self, mask, value, delta):
        return meet(_up, (value, delta), mask)

    def shfl_down_sync(self, mask, value, delta):
        return meet(_down, (value, delta), mask)

    def threadfence(self) -> None:
        """Memory is always in order here."""

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, nanoseconds) -> None:
        look_again()

    def popc(self, value) -> int:
        return (int(value) & (1 << 64) - 1).bit_count()

    def ffs(self, value) -> int:
        return (int(value) & -int(value)).bit_length()

    def selp(self, condition, a, b):
        return a if condition else b


CUDA = Cuda()
MATH = SimpleNamespace(
    **{
        name: getattr(np, name)
        for name in ("exp", "exp2", "log", "log2", "sqrt", "floor", "ceil", "tanh", "sin", "cos")
    },
    fabs=np.abs,
    isnan=lambda x: bool(np.isnan(x)),
    isinf=lambda x: bool(np.isinf(x)),
    inf=math.inf,
    nan=math.nan,
    pi=math.pi,
)
