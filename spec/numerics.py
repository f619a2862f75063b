"""Numbers that every specification shares: rounding, row-wise products, INT4, counted costs.

Activations carry their precision in their dtype. A specification widens its inputs to float32,
computes, and rounds its result once to the dtype of its first input: bfloat16 as the kernels do, or
float32, which leaves the same formulas unrounded for comparison with other implementations.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
GROUP = 32  # columns that share one INT4 scale
PER_WORD = 8  # INT4 values in an int32 word
MASS_BITS = 40  # fractional bits of a fixed-point probability mass

SIGN = np.uint32(1 << 31)
LOW = np.uint64(0xFFFFFFFF)  # the low half of a 64-bit word

# ln 2 in two parts: the first has 15 bits, so that an exponent times it is exact
LN2_HIGH = np.float32(45426 / 65536)
LN2_LOW = np.float32(0.6931471805599453 - 45426 / 65536)
LOG2_E = np.float32(1.4426950408889634)
LOWEST_EXPONENT = np.float32(-87)  # e**-87 is still a normal float32
SQRT_HALF_BITS = np.int32(0x3F3504F3)  # float32 bits of sqrt(1/2)
EXP_SERIES = tuple(np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2, 1, 1))  # 1/7! .. 1/0!
ATANH_SERIES = tuple(np.float32(1 / n) for n in (9, 7, 5, 3))


class Cost(NamedTuple):
    """Compulsory work of one call: every input read once, every output written once."""

    bytes: int
    flops: int


def widen(x: np.ndarray) -> np.ndarray:
    """x as float32; exact for bfloat16, free for float32."""
    return np.asarray(x).astype(F32, copy=False)


def bf16(x: np.ndarray) -> np.ndarray:
    """x rounded to bfloat16, nearest even."""
    return np.asarray(x).astype(BF16)


def matvec(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x[..., K] times weight[N, K] transposed, float32[..., N], one matrix-vector product a row.

    A matrix product picks other code for other row counts, so its bits depend on the row's company.
    A stack of single rows does not: it is batch-invariant, as the law of this project wants it.
    """
    return np.matmul(widen(x)[..., None, :], widen(weight).T)[..., 0, :]


def _horner(x: np.ndarray, coefficients: tuple[np.float32, ...]) -> np.ndarray:
    """Polynomial, highest coefficient first; one rounded product and one rounded sum a step."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def exp32(x: np.ndarray) -> np.ndarray:
    """e**x for float32 x <= 0, in float32 operations that round one by one; error below 1.5 ulp.

    A kernel that issues the same operations gets the same bits, which no library's exp promises.
    2**n * e**r with n = rint(x / ln 2) and |r| <= ln(2) / 2; 0 below -87 and for NaN.
    """
    x = widen(x)
    inside = np.fmax(x, LOWEST_EXPONENT)
    n = np.rint(inside * LOG2_E)
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    power = ((n.astype(np.int32) + 127) << 23).view(F32)
    return np.where(x >= LOWEST_EXPONENT, _horner(r, EXP_SERIES) * power, np.float32(0))


def log32(x: np.ndarray) -> np.ndarray:
    """ln x for normal x > 0, in float32 operations that round one by one; error below 2.5 ulp.

    x = 2**e * m with m in [sqrt(1/2), sqrt(2)); ln m = 2 atanh s, s = (m - 1) / (m + 1), which
    keeps its relative precision around x = 1.
    """
    bits = np.asarray(x, F32).view(np.int32)
    e = (bits - SQRT_HALF_BITS) >> 23
    m = (bits - (e << 23)).view(F32)
    s = (m - np.float32(1)) / (m + np.float32(1))
    square, twice, exponent = s * s, s + s, e.astype(F32)
    tail = twice * (square * _horner(square, ATANH_SERIES))
    return exponent * LN2_HIGH + (twice + (tail + exponent * LN2_LOW))


def mass(x: np.ndarray) -> np.ndarray:
    """floor(e**x * 2**40) as int64 for float32 x <= 0: sums of it are exact in any order."""
    return (exp32(x) * np.float32(2.0**MASS_BITS)).astype(np.int64)


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """int64[..., k]: indices of the k largest of float32 x[..., V], in descending order.

    Equal values: lower index first; NaN last. A float's bits become an integer of the same order,
    with the inverted index below it: keys never tie, so that no way of selecting has a choice.
    """
    bits = (x + np.float32(0)).view(np.uint32)  # -0 equals +0
    order = np.where(bits & SIGN, ~bits, bits | SIGN)
    order[np.isnan(x)] = 0
    width = x.shape[-1]
    keys = (order.astype(np.uint64) << np.uint64(32)) | (LOW - np.arange(width, dtype=np.uint64))
    if 0 < k < width:
        keys = np.partition(keys, width - k, axis=-1)
    keys = np.sort(keys[..., width - k :], axis=-1)[..., ::-1]
    return (LOW - (keys & LOW)).astype(np.int64)


def unpack_int4(packed: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """int32[..., out, ceil(in/8)] -> int8[..., out, in] in -8..7.

    Layout of compressed-tensors `pack-quantized`: value + 8 in a nibble, lowest nibble first, along
    the input dimension. Nibbles that fill up the last word are cut off by `shape` = (out, in).
    """
    rows, columns = (int(n) for n in shape)
    if packed.dtype != np.int32:
        raise ValueError(f"packed INT4 words must be int32, not {packed.dtype}")
    if packed.shape[-2:] != (rows, -(-columns // PER_WORD)):
        raise ValueError(f"weight_shape {(rows, columns)} does not fit packed words {packed.shape}")
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = (packed.view(np.uint32)[..., None] >> shifts) & np.uint32(15)
    flat = nibbles.reshape(*packed.shape[:-1], packed.shape[-1] * PER_WORD)
    return (flat[..., :columns].astype(np.int16) - 8).astype(np.int8)


def pack_int4(values: np.ndarray) -> np.ndarray:
    """int8[..., out, in] in -8..7 -> int32[..., out, ceil(in/8)]; the inverse of `unpack_int4`."""
    columns = values.shape[-1]
    words = -(-columns // PER_WORD)
    nibbles = np.zeros((*values.shape[:-1], words * PER_WORD), np.uint32)
    nibbles[..., :columns] = values.astype(np.int32) + 8
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    grouped = nibbles.reshape(*values.shape[:-1], words, PER_WORD) << shifts
    return np.bitwise_or.reduce(grouped, axis=-1).view(np.int32)


def dequantize_int4(packed: np.ndarray, scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """bfloat16[..., out, in] = bf16(q * scale), a scale for 32 columns (compressed-tensors)."""
    columns = int(shape[1])
    if scale.shape != (*packed.shape[:-1], -(-columns // GROUP)):
        raise ValueError(f"weight_shape {tuple(shape)} does not fit weight_scale {scale.shape}")
    scales = np.repeat(widen(scale), GROUP, axis=-1)[..., :columns]
    return bf16(unpack_int4(packed, shape).astype(F32) * scales)


def quantize_int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float[..., out, in] -> (int8 values, bfloat16 scales max|w| / 7.5 of each 32 columns)."""
    groups = widen(weight).reshape(*weight.shape[:-1], weight.shape[-1] // GROUP, GROUP)
    scale = bf16(np.maximum(np.abs(groups).max(-1), np.float32(1e-12)) / np.float32(7.5))
    values = np.clip(np.rint(groups / widen(scale)[..., None]), -8, 7).astype(np.int8)
    return values.reshape(weight.shape), scale


@dataclass(frozen=True)
class Int4Matrix:
    """One matrix of all experts, as published: packed int32[E,N,K/8], scale bfloat16[E,N,K/32]."""

    packed: np.ndarray
    scale: np.ndarray
    shape: tuple[int, int]

    @cached_property
    def _dense(self) -> dict[int, np.ndarray]:
        return {}

    def dense(self, expert: int) -> np.ndarray:
        """float32[N, K] = bf16(q * scale) of one expert; kept, since later tokens need it again."""
        if expert not in self._dense:
            weight = dequantize_int4(self.packed[expert], self.scale[expert], self.shape)
            self._dense[expert] = np.asfortranarray(widen(weight))
        return self._dense[expert]
