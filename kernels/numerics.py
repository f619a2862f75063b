"""Device functions with the bits of `spec/numerics.py`: exp32, log32, mass, and ordered keys.

A key holds a logit and its token id in one integer of 52 bits: greater logit, greater key; equal
logits, lower id, greater key. Keys of a row never tie, so that a maximum or a selection of them
has the same result in any order. 0 is below every key.
"""

from numba import cuda, float32, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.spec.numerics import (
    ATANH_SERIES,
    EXP_SERIES,
    F32,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST_EXPONENT,
    MASS_BITS,
    SQRT_HALF_BITS,
)

ID_BITS = 20
LAST_ID = (1 << ID_BITS) - 1  # of a key's low bits; vocabularies stay below
SQRT_HALF = int(SQRT_HALF_BITS)
MASS_UNIT = F32.type(2.0**MASS_BITS)
MASS_WEIGHT = F32.type(2.0**-MASS_BITS)
EXP_TERMS, ATANH_TERMS = len(EXP_SERIES), len(ATANH_SERIES)
NAN = F32.type("nan")
ORDER_NEGATIVE_INFINITY = 0x007FFFFF
ORDER_INFINITY = 0xFF800000


@cuda.jit(device=True, inline="always")
def divided(a, b):
    """Quotient and rest of 32-bit integers from 0 on: `//` would be a call, for 64 bits."""
    quotient = int32(ptx.divide(a, b))
    return quotient, int32(a - quotient * b)


@cuda.jit(device=True, inline="always")
def exp32(x):
    """e**x for x <= 0; 0 below -87 and for NaN."""
    inside = ptx.fmax(x, LOWEST_EXPONENT)
    n = ptx.rint(inside * LOG2_E)
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    total = EXP_SERIES[0]
    for i in range(1, EXP_TERMS):
        total = total * r + EXP_SERIES[i]
    result = total * ptx.as_float((ptx.to_int(n) + 127) << 23)
    if not x >= LOWEST_EXPONENT:
        result = float32(0)
    return result


@cuda.jit(device=True, inline="always")
def log32(x):
    """ln x for normal x > 0."""
    bits = int32(ptx.as_bits(x))
    e = (bits - SQRT_HALF) >> 23
    m = ptx.as_float(bits - (e << 23))
    s = (m - float32(1)) / (m + float32(1))
    square, twice, exponent = s * s, s + s, ptx.to_float(e)
    total = ATANH_SERIES[0]
    for i in range(1, ATANH_TERMS):
        total = total * square + ATANH_SERIES[i]
    tail = twice * (square * total)
    return exponent * LN2_HIGH + (twice + (tail + exponent * LN2_LOW))


@cuda.jit(device=True, inline="always")
def mass(x):
    """floor(e**x * 2**40) for x <= 0: an integer, whose sums are exact in any order."""
    return int64(exp32(x) * MASS_UNIT)


@cuda.jit(device=True, inline="always")
def ordered(x):
    """32 bits in the order of the floats; -0 equals +0. Not for NaN."""
    bits = ptx.as_bits(x + float32(0))
    result = int64(bits | 0x80000000)
    if bits & 0x80000000:
        result = 0xFFFFFFFF - int64(bits)
    return result


@cuda.jit(device=True, inline="always")
def float_of(order):
    """The float of `ordered` bits."""
    bits = order - 0x80000000
    if order < 0x80000000:
        bits = 0xFFFFFFFF - order
    return ptx.as_float(bits)


@cuda.jit(device=True, inline="always")
def key_of(order, token_id):
    return (order << ID_BITS) + (LAST_ID - token_id)


@cuda.jit(device=True, inline="always")
def id_of(key):
    return LAST_ID - (key & LAST_ID)
