"""Rows moved as they are, in pieces of 16 bytes, out of views whose rows lie apart."""

import math

from numba import cuda

from ddtree_numba.kernels import ptx

WORDS = 4  # of a piece
BYTES = 16


@cuda.jit(device=True, inline="always")
def load16(x, i, words, k):
    """The 16 bytes at x[i] into words[k .. k + 3]."""
    words[k], words[k + 1], words[k + 2], words[k + 3] = ptx.ldg4(x, i)


@cuda.jit(device=True, inline="always")
def store16(y, i, words, k):
    ptx.stg4(y, i, words[k], words[k + 1], words[k + 2], words[k + 3])


def strides_of(name: str, array, leading: int, multiple: int) -> list[int]:
    """Elements from one index to the next along each of the first `leading` axes.

    The axes behind them are one row, which lies without gaps; rows begin at multiples of
    `multiple` elements, as vector accesses need. ValueError names what does not fit.
    """
    item, shape, strides = array.itemsize, array.shape, array.strides
    width = math.prod(shape[leading:])
    dense = item * width
    if array.size == 0:
        return [0] * leading
    for n, step in zip(shape[leading:], strides[leading:], strict=True):
        dense //= n
        if n > 1 and step != dense:
            raise ValueError(f"{name}: strides {strides} of shape {shape} leave gaps in a row")
    if width % multiple:
        raise ValueError(f"{name}: rows of {width}, expected a multiple of {multiple}")
    for n, step in zip(shape[:leading], strides[:leading], strict=True):
        if n > 1 and (step < 0 or step % (multiple * item)):
            raise ValueError(f"{name}: strides {strides} of shape {shape} break up 16-byte pieces")
    return [step // item for step in strides[:leading]]
