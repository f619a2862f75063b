"""Two norms and a rotation of one row, in one launch; see `spec/norm_rope_append.py`.

A block has a row of the joint projection: its first warps norm q_a, the next the latent, in the
same steps over their own columns; the last warp rotates the shared key and waits for none of them.
Norms add in the order of `rms_norm` and have its bits; the rotation is that of `rope`, with its
table: a position outside of it gives NaN. Norms' weights do not wait for the kernels ahead on the
stream, which must not write them.
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, rows_of, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.rms_norm import WARP, shape_of, warp_sum
from ddtree_numba.kernels.rope import make_turn
from ddtree_numba.kernels.vector import WIDTH, WORDS8, fetch8, store8, widen8

PAIRS = WIDTH // 2  # of a lane that rotates


@cache
def make(element, q_width: int, kv_width: int, rope_width: int, shards: int = 1) -> Kernel:
    (q_each, q_warps, _), (kv_each, kv_warps, _) = shape_of(q_width), shape_of(kv_width)
    each, last, half = max(q_each, kv_each), q_warps + kv_warps, rope_width // 2
    q_terms, kv_terms = np.float32(q_width), np.float32(kv_width)
    words = WORDS8[element]
    count = each * words
    q_part, rest_part = q_width // shards, (kv_width + rope_width) // shards
    turn = make_turn(element, rope_width)
    fetch, widen, store = fetch8[element], widen8[element], store8[element]

    @cuda.jit(device=True, inline="always")
    def place(column, part, start):
        """Where a column of q_a, or of the rest, lies in a row of ranks' parts."""
        if shards == 1:
            return start * q_width + column
        return column // part * (q_part + rest_part) + start * q_part + column % part

    @kernel(
        threads=WARP * (last + 1),
        name=f"norm_rope_append_{q_width}_{kv_width}_{rope_width}_{element}"
        + (f"_of_{shards}" if shards > 1 else ""),
        registers=96,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def norm_rope_append_kernel(
        joint: read(element),
        joint_row: int64,
        q_norm: read(element),
        kv_norm: read(element),
        eps: float32,
        positions: read(int32),
        table: read(float32),
        known: int32,
        q: write(element),
        scratch: write(element),
        scratch_row: int64,
    ):
        row, warp = int64(cuda.blockIdx.x), cuda.threadIdx.x >> 5
        first, warps, width, start, terms = 0, q_warps, q_width, 0, q_terms
        norm, out, to, part = q_norm, q, row * q_width, q_part
        if warp >= q_warps:
            first, warps, width, start, terms = q_warps, kv_warps, kv_width, 1, kv_terms
            norm, out, to, part = kv_norm, scratch, row * scratch_row, rest_part
        lane = int32(cuda.threadIdx.x - first * WARP)
        step = warps * WARP
        xs = cuda.local.array(count, uint32)
        weights = cuda.local.array(count, uint32)
        values = cuda.local.array(WIDTH, float32)
        if warp < last:
            for n in range(each):
                column = (lane + n * step) * WIDTH
                if column < width:
                    fetch(norm, column, weights, n * words)
        ptx.launch_next()
        ptx.wait_for_previous()
        if warp < last:
            for n in range(each):
                column = (lane + n * step) * WIDTH
                if column < width:
                    fetch(joint, row * joint_row + place(column, part, start), xs, n * words)
                else:
                    for i in range(words):
                        xs[n * words + i] = 0
            square = float32(0)
            for n in range(each):
                widen(xs, n * words, values, 0)
                for i in range(WIDTH):
                    square = square + values[i] * values[i]
            square = warp_sum(square)
            sums = cuda.shared.array(WARP, float32)
            if lane & 31 == 0:
                sums[warp] = square
            ptx.bar_sync(1, last * WARP)
            square = float32(0)
            if lane & 31 < warps:
                square = sums[first + (lane & 31)]
            scale = float32(1) / math.sqrt(warp_sum(square) / terms + eps)
            other = cuda.local.array(WIDTH, float32)
            for n in range(each):
                column = (lane + n * step) * WIDTH
                if column < width:
                    widen(xs, n * words, values, 0)
                    widen(weights, n * words, other, 0)
                    for i in range(WIDTH):
                        values[i] = values[i] * scale * other[i]
                    store(out, to + column, values, 0)
        else:
            pair = (cuda.threadIdx.x & 31) * PAIRS
            if pair < half:
                at = row * joint_row + place(kv_width + 2 * pair, rest_part, 1)
                to += kv_width + 2 * pair
                turn(joint, at, positions, row, table, known, pair, scratch, to)

    return norm_rope_append_kernel


def norm_rope_append(
    joint,
    q_norm,
    kv_norm,
    eps: float,
    positions,
    table,
    scratch,
    shards: int = 1,
    *,
    out,
    stream=None,
):
    """Normed q into out[T, Q], normed latent and rotated key into scratch[T, D+P]; returns out.

    table: `rope_table`. Rows of joint and of scratch may lie apart.
    """
    tokens, width, joint_row = rows_of("joint", joint)
    rope_width = table.shape[-1]
    widths = len(q_norm), len(kv_norm), rope_width
    if sum(widths) != width:
        raise ValueError(f"joint: rows of {width}, expected {' + '.join(map(str, widths))}")
    rows, key_width, scratch_row = rows_of("scratch", scratch)
    if (rows, key_width) != (tokens, width - widths[0]) or scratch.dtype != joint.dtype:
        expected = f"{joint.dtype} {(tokens, width - widths[0])}"
        raise ValueError(f"scratch: {scratch.dtype} {scratch.shape}, expected {expected}")
    if any(n % WIDTH for n in (*widths, joint_row, scratch_row)):
        apart = f"{joint_row} and {scratch_row} apart"
        raise ValueError(f"joint, scratch: {widths}, rows {apart}: expected multiples of {WIDTH}")
    if rope_width > WARP * WIDTH:
        raise ValueError(f"table: rows of {rope_width}, at most {WARP * WIDTH}")
    if shards < 1 or widths[0] % (WIDTH * shards) or key_width % (WIDTH * shards):
        parts = f"{widths[0]} and {key_width} in {shards} parts"
        raise ValueError(f"shards: {parts}, expected multiples of {WIDTH}")
    require("q_norm", q_norm, widths[:1], joint.dtype)
    require("kv_norm", kv_norm, widths[1:2], joint.dtype)
    require("positions", positions, (tokens,), "int32")
    require("table", table, (len(table), rope_width), "float32")
    require("out", out, (tokens, widths[0]), joint.dtype)
    make(element_of("joint", joint), *widths, shards).launch(
        tokens,
        *(joint, joint_row, q_norm, kv_norm, eps, positions, table, len(table)),
        *(out, scratch, scratch_row),
        stream=stream,
    )
    return out


def instances() -> list[Kernel]:
    """K2.6, at any TP size, and the embedded model."""
    parts = [make(bf16, 1536, 512, 64, shards) for shards in (2, 8)]
    return [make(bf16, 1536, 512, 64), make(bf16, 96, 64, 16), *parts]
