"""What the arithmetic of `ptx.py` does, for the CPU executor: the same names, in plain Python.

Registers are Python integers (unsigned where the instruction's are) and numpy float32.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.kernels.simt_memory import wrap
from ddtree_numba.kernels.simt_threads import Fault

M32, M64 = 0xFFFFFFFF, (1 << 64) - 1
NAN, NAN_BF16 = np.uint32(0x7FFFFFFF).view(np.float32), 0x7FFF
SMALLEST_NORMAL = np.finfo(np.float32).tiny


def single(value: Any) -> np.float32:
    if type(value) is not np.float32:
        raise Fault(f"{type(value).__name__} {value} where float32 is meant")
    return value


# --- float arithmetic: each operation rounds once


def add(a, b):
    return single(a) + single(b)


def sub(a, b):
    return single(a) - single(b)


def mul(a, b):
    return single(a) * single(b)


def div(a, b):
    return single(a) / single(b)


def _product_sum(a, b, c) -> tuple[float, float]:
    """a * b + c in float64, and what that sum lost; the product is exact."""
    product, addend = float(single(a)) * float(single(b)), float(single(c))
    total = product + addend
    rest = total - product
    return total, (product - (total - rest)) + (addend - rest)


def fma(a, b, c):
    """One rounding: where float64 has rounded to a tie, what it lost decides."""
    total, lost = _product_sum(a, b, c)
    near = np.float32(total)
    if not math.isfinite(total) or lost == 0:
        return near
    other = np.float32(math.nextafter(total, math.copysign(math.inf, lost)))
    return other if total == (float(near) + float(other)) / 2 else near


def fmax(a, b):
    if single(a) > single(b):
        return a
    return b if b > a else _neither(a, b, negative=False)


def fmin(a, b):
    if single(a) < single(b):
        return a
    return b if b < a else _neither(a, b, negative=True)


def _neither(a, b, negative: bool):
    """Of equal numbers one, of two zeros the `negative` one; the number beside a NaN of any kind.

    np.fmax leaves the order of zeros open, and gives NaN for a number and a signalling NaN.
    """
    if a != a:
        return b if b == b else NAN
    return a if b != b or np.signbit(a) == negative else b


def rint(a):
    return np.rint(single(a))


def _flushed(a):
    """ftz: a subnormal number becomes a zero of its sign."""
    return np.copysign(np.float32(0), a) if abs(a) < SMALLEST_NORMAL else a


def exp2(a):
    return _flushed(np.exp2(_flushed(single(a))))


def rcp(a):
    return _flushed(np.float32(1) / _flushed(single(a)))


def to_int(a):
    if np.isnan(single(a)):
        return 0
    return int(np.clip(np.float64(a), -(2.0**31), 2.0**31 - 1))


def to_float(a):
    return np.float32(wrap(a, 32))


# --- bits


def as_float(bits):
    return np.uint32(int(bits) & M32).view(np.float32)


def as_bits(value):
    return int(single(value).view(np.uint32))


def round_bf16(value):
    bits = as_bits(value)
    if value != value:
        return NAN_BF16
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def pack_bf16(high, low):
    return round_bf16(high) << 16 | round_bf16(low)


def _halves(*words: int) -> list[tuple]:
    """The low halves, then the high halves, as float32."""
    low = tuple(as_float(int(word) << 16) for word in words)
    return [low, tuple(as_float(int(word) & 0xFFFF0000) for word in words)]


def _each_half(update: Callable) -> Callable:
    def packed(*words: int) -> int:
        low, high = (round_bf16(update(*values)) for values in _halves(*words))
        return high << 16 | low

    return packed


# float32 is wide enough that rounding a product of bfloat16 twice equals rounding it once
mul_bf16x2 = _each_half(mul)


def _fma_bf16(a, b, c):
    """Rounded to odd, which keeps all that the second rounding needs to know."""
    total, lost = _product_sum(a, b, c)
    near = np.float32(total)
    lost = total - float(near) or lost
    if math.isfinite(total) and lost and not as_bits(near) & 1:
        near = np.nextafter(near, np.float32(math.copysign(math.inf, lost)))
    return near


fma_bf16x2 = _each_half(_fma_bf16)


def prmt(a, b, selector):
    data = (int(a) & M32 | (int(b) & M32) << 32).to_bytes(8, "little")
    result = 0
    for i in range(4):
        choice = int(selector) >> 4 * i & 15
        byte = data[choice & 7]
        if choice & 8:
            byte = 0xFF * (byte >> 7)
        result |= byte << 8 * i
    return result


def halves(word):
    return int(word) & 0xFFFF, int(word) >> 16 & 0xFFFF


def joined(low, high):
    return int(high) << 16 & M32 | int(low) & 0xFFFF


def mul_wide(a, b):
    return (int(a) & M32) * (int(b) & M32)


def divide(a, b):
    return (int(a) & M32) // (int(b) & M32)


def clz(a):
    return 32 - (int(a) & M32).bit_length()
