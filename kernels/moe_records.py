"""INT4 experts in the order in which a warp takes them: records of 16 rows by 64 columns.

A record is 576 bytes, the records of a row tile follow each other along the columns, so that a warp
reads one contiguous stream. Lane 4 g + t owns 16 bytes: rows g and g + 8, columns 8 t to 8 t + 7 of
both groups of 32. As operands of the mma those columns are permuted, and the tokens likewise: a
lane finds its eight in 16 bytes. The last 64 bytes are the scales.

A scale is stored as the multiplier of a raw nibble. A bfloat16 whose exponent field is 0 or 1 is
linear in its bits, value = bits * 2**-133: `word & 0x000F000F` is two nibbles times 2**-133 and
`word & 0x00F000F0` two times 2**-129. One fma with s * 2**125 for rows g, s * 2**121 for rows
g + 8, and the addend -8 s * 2**-8 gives bf16(q * s) * 2**-8, rounded once as published; the sums
are multiplied by 2**8, exactly. That holds for scales of 0 and of 2**-110 up to 8, of either sign.

gate_up is interleaved, a tile holds 8 gate rows above their 8 up rows: the activation then needs
no other lane. Its rows and the columns of down fill up to multiples of 64, with scales of 0.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, require, update, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.spec.numerics import GROUP, PER_WORD, Int4Matrix

ROWS, COLUMNS = 16, 64  # of a record
WORDS, SCALES = 144, 128  # of a record; the word where its scales begin
BYTES = 4 * WORDS
THREADS = 128
LEAST, MOST = 17, 129  # exponent fields of a scale: 2**-110 and below 8
RAISED = 125 << 7, 121 << 7  # of the exponent field, for rows g and g + 8


@dataclass(frozen=True)
class Records:
    """One matrix of all experts: words uint32[E, row tiles, column tiles, 144]."""

    words: Any
    shape: tuple[int, int]  # of one expert, as published
    gated: bool  # gate and up rows, interleaved


def filled(n: int) -> int:
    return -(-n // COLUMNS) * COLUMNS


def records_shape(count: int, shape: tuple[int, int], gated: bool) -> tuple[int, int, int, int]:
    """Of the words that `pack` fills."""
    rows, columns = shape
    rows = 2 * filled(rows // 2) if gated else rows
    if rows % COLUMNS or (gated and columns % COLUMNS):
        raise ValueError(f"experts of {shape}: hidden size is no multiple of {COLUMNS}")
    if columns % GROUP or shape[0] % GROUP:
        raise ValueError(f"experts of {shape}: inner size is no multiple of {GROUP}")
    return count, rows // ROWS, filled(columns) // COLUMNS, WORDS


@cuda.jit(device=True, inline="always")
def spread(bits):
    """Four nibbles of 16 bits to bits 0, 16, 8 and 24."""
    return bits & 0x0F0F | (bits & 0xF0F0) << 12


@cache
def make() -> Kernel:
    @kernel(threads=THREADS, name="moe_pack", registers=48, opcodes=("STG.E.128",))
    @cuda.jit
    def pack_kernel(
        packed: read(int32),
        scale: read(bf16),
        records: write(uint32),
        faults: update(int32),
        total: int64,
        tiles: int32,
        depth: int32,
        rows: int32,
        words: int32,
        half_step: int32,
        tile_step: int32,
    ):
        """A warp a record. Row of (half, tile, g): half * half_step + tile * tile_step + g."""
        lane = cuda.threadIdx.x & 31
        record = cuda.blockIdx.x * (THREADS // 32) + (cuda.threadIdx.x >> 5)
        if record < total:
            expert = record // (tiles * depth)
            step = record % depth
            first = record // depth % tiles * tile_step
            inside = tile_step == ROWS or first < half_step
            source = cuda.local.array(4, uint32)
            for n in range(4):
                group, half = n >> 1, n & 1
                row = expert * rows + half * half_step + first + (lane >> 2)
                word = step * (COLUMNS // PER_WORD) + 4 * group + (lane & 3)
                source[n] = 0
                if inside and word < words:
                    source[n] = ptx.ldg1(packed, row * words + word)
            low = cuda.local.array(4, uint32)
            for n in range(4):
                group, part = n >> 1, n & 1
                above = spread(source[2 * group] >> 16 * part & 0xFFFF)
                low[n] = above | spread(source[2 * group + 1] >> 16 * part & 0xFFFF) << 4
            ptx.stg4(records, record * WORDS + 4 * lane, low[0], low[1], low[2], low[3])
            half = lane & 1
            row = expert * rows + half * half_step + first + (lane >> 2)
            group = step * (COLUMNS // GROUP) + (lane >> 1 & 1)
            groups = words * PER_WORD // GROUP
            bits = int32(0)
            if inside and group < groups:
                bits = int32(scale[row * groups + group])
            if bits & 0x7FFF:
                exponent = bits >> 7 & 0xFF
                if exponent < LEAST or exponent > MOST:
                    faults[expert] = 1
                bits = bits + (RAISED[1] if half else RAISED[0])
            both = ptx.shfl_xor(bits, 1) << 16 | bits & 0xFFFF
            if half == 0:
                ptx.stg1(records, record * WORDS + SCALES + (lane >> 1), both)

    return pack_kernel


def pack(matrix: Int4Matrix, gated: bool, *, faults, out, stream=None) -> Records:
    """`matrix` as records in out, uint32 of `records_shape`.

    faults: int32[E], becomes 1 for an expert with a scale that cannot be multiplied exactly;
    `refuse` reads it once everything is packed.
    """
    count, (rows, columns) = len(matrix.packed), matrix.shape
    require("packed", matrix.packed, (count, rows, columns // PER_WORD), "int32")
    require("scale", matrix.scale, (count, rows, columns // GROUP))
    shape = records_shape(count, matrix.shape, gated)
    require("out", out, shape, "uint32")
    require("faults", faults, (count,), "int32")
    _, tiles, depth, _ = shape
    total = count * tiles * depth
    steps = (rows // 2, ROWS // 2) if gated else (ROWS // 2, ROWS)
    make().launch(
        -(-total // (THREADS // 32)),
        *(matrix.packed, matrix.scale, out, faults),
        *(total, tiles, depth, rows, columns // PER_WORD, *steps),
        stream=stream,
    )
    return Records(out, (rows, columns), gated)


def refuse(name: str, faults: np.ndarray) -> None:
    """One line for the first expert of the tensor `name` with a scale out of range."""
    if faults.any():
        expert = int(np.flatnonzero(faults)[0])
        raise ValueError(
            f"{name}: expert {expert} has a scale that is neither 0 nor from 2**-110 to below 8"
        )


def slices(depth: int) -> int:
    """Into how many runs of records a row's sum is cut, each a chain of mma, added in order.

    A function of the weight's shape alone. Eight warps share a long row; the two halves of a short
    one are independent chains of a single warp.
    """
    if depth > 8 and depth % 8 == 0:
        return 8
    return 1 if depth % 2 else 2


def instances() -> list[Kernel]:
    return [make()]
