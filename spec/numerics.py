"""Numbers that every specification shares: rounding, row-wise products, INT4, counted costs.

Activations carry their precision in their dtype. A specification widens its inputs to float32, computes,
and rounds its result once to the dtype of its first input: bfloat16 as the kernels do, or float32,
which leaves the same formulas unrounded for comparison with other implementations.
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

    A matrix product picks other code for other row counts, so its bits depend on the row's company;
    a stack of single rows does not.
    """
    return np.matmul(widen(x)[..., None, :], widen(weight).T)[..., 0, :]


def unpack_int4(packed: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """int32[..., out, ceil(in/8)] -> int8[..., out, in] in -8..7.

    Layout of compressed-tensors `pack-quantized`: value + 8 in a nibble, lowest nibble first, along the
    input dimension. Nibbles that fill up the last word are cut off by `shape` = (out, in).
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
    """bfloat16[..., out, in] = bf16(q * scale), a scale for every 32 columns (compressed-tensors)."""
    columns = int(shape[1])
    if scale.shape != (*packed.shape[:-1], -(-columns // GROUP)):
        raise ValueError(f"weight_shape {tuple(shape)} does not fit weight_scale {scale.shape}")
    scales = np.repeat(widen(scale), GROUP, axis=-1)[..., :columns]
    return bf16(unpack_int4(packed, shape).astype(F32) * scales)


def quantize_int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float[..., out, in] -> (int8 values, bfloat16 scales): scale = max|w| / 7.5 of each 32 columns."""
    groups = widen(weight).reshape(*weight.shape[:-1], weight.shape[-1] // GROUP, GROUP)
    scale = bf16(np.maximum(np.abs(groups).max(-1), np.float32(1e-12)) / np.float32(7.5))
    values = np.clip(np.rint(groups / widen(scale)[..., None]), -8, 7).astype(np.int8)
    return values.reshape(weight.shape), scale


@dataclass(frozen=True)
class Int4Matrix:
    """The same matrix of all experts, as published: packed int32[E, N, K/8], scale bfloat16[E, N, K/32]."""

    packed: np.ndarray
    scale: np.ndarray
    shape: tuple[int, int]

    @cached_property
    def _dense(self) -> dict[int, np.ndarray]:
        return {}

    def dense(self, expert: int) -> np.ndarray:
        """float32[N, K] holding bf16(q * scale) of one expert; kept, since the next token needs it again."""
        if expert not in self._dense:
            weight = dequantize_int4(self.packed[expert], self.scale[expert], self.shape)
            self._dense[expert] = np.asfortranarray(widen(weight))
        return self._dense[expert]
