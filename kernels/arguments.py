"""How a kernel declares its parameters, and how a launcher checks what it was given.

    @kernel(threads=256)
    @cuda.jit
    def body(x: read(bf16), weight: read(float32), y: write(bf16), width: int32): ...

A pointer says what the kernel does with the memory: `read` only, `write` without looking (the CPU
executor fills it with poison first), or `update`. Its elements are Numba's scalar types, or `bf16`:
bfloat16 arrays, which the kernel sees as uint16 bits. Scalars are Numba types. Each is one
parameter of the compiled kernel.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import float32
from numba.cuda import types

from ddtree_numba.spec.numerics import BF16


def code_of(dtype) -> str:
    """One-letter code of a dtype for `struct` and memoryview; bfloat16 is its bits."""
    dtype = np.dtype(dtype)
    if dtype == BF16:
        return "H"
    return {"l": "q", "L": "Q", "?": "B"}.get(dtype.char, dtype.char)


class Bf16:
    """Elements that are bfloat16 for the caller and uint16 bits for the kernel."""

    def __repr__(self) -> str:
        return "bf16"


bf16 = Bf16()


@dataclass(frozen=True)
class Pointer:
    element: types.Type
    dtype: np.dtype  # of the arrays that callers pass
    reads: bool
    writes: bool

    @property
    def numba_type(self) -> types.Type:
        return types.CPointer(self.element)


@dataclass(frozen=True)
class Scalar:
    numba_type: types.Type

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(str(self.numba_type))


def _pointer(element, reads: bool, writes: bool) -> Pointer:
    if element is bf16:
        return Pointer(types.uint16, BF16, reads, writes)
    return Pointer(element, np.dtype(str(element)), reads, writes)


def read(element) -> Pointer:
    return _pointer(element, reads=True, writes=False)


def write(element) -> Pointer:
    return _pointer(element, reads=False, writes=True)


def update(element) -> Pointer:
    return _pointer(element, reads=True, writes=True)


def parameters(function: Callable) -> dict[str, Pointer | Scalar]:
    """Name -> kind of every parameter, from the annotations."""
    found: dict[str, Pointer | Scalar] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation
        if kind is parameter.empty:
            raise TypeError(f"{function.__name__}: parameter {name} has no type")
        found[name] = kind if isinstance(kind, Pointer) else Scalar(kind)
    return found


def require(name: str, array, shape: tuple[int, ...], *dtypes) -> None:
    """Refuse an array that a kernel would misread: shape, dtype, order, in one line."""
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {tuple(array.shape)}, expected {tuple(shape)}")
    if dtypes and array.dtype not in dtypes:
        expected = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"{name}: dtype {array.dtype}, expected {expected}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: not contiguous, strides {array.strides}")


def element_of(name: str, array):
    """The element kind of an array of activations or weights: bf16 or float32."""
    if array.dtype == BF16:
        return bf16
    if array.dtype == np.float32:
        return float32
    raise ValueError(f"{name}: dtype {array.dtype}, expected bfloat16 or float32")


def rows_of(name: str, array) -> tuple[int, int, int]:
    """Number of rows, their width, and elements from one to the next.

    The rows of a matrix may lie apart, as in a slice of columns; more axes must lie without gaps.
    """
    *leading, width = array.shape
    if not array.flags.c_contiguous:
        if array.ndim != 2 or array.strides[1] != array.itemsize or array.strides[0] < 0:
            raise ValueError(f"{name}: strides {array.strides} of shape {array.shape} are no rows")
        return array.shape[0], width, array.strides[0] // array.itemsize
    return math.prod(leading), width, width
