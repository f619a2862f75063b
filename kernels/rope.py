"""Rotary positions on the device; see `spec/rope.py`.

Cosine and sine come from a table, float32[positions, d] = [cos | sin] of every position up to the
longest context, made once on the host by the specification itself: a sine of the device would have
other bits. For K2.6's 262,144 positions it takes 64 MiB for the target (d = 64) and 128 MiB for the
drafter (d = 128); an engine makes it as long as its longest context. A position outside of the
table gives NaN.

A thread turns eight columns (half split: eight of each half) of up to four heads, which share what
it read of the table. A head or token beyond the last is read as the last, so that no branch stands
between the loads: columns and position are under way together, then the table's row.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.pieces import strides_of
from ddtree_numba.kernels.vector import WIDTH, WORDS8, fetch8, store8, widen8
from ddtree_numba.spec import rope as spec
from ddtree_numba.spec.numerics import F32

THREADS = 128
HEADS = 4  # of a thread
CHUNK = 4096  # positions of the table that are made at a time
NAN = F32.type(np.nan)


def rope_table(positions: int, inv_freq: np.ndarray, amplitude: float = 1.0) -> np.ndarray:
    """float32[positions, d] = [amplitude cos | amplitude sin]: how each position turns (1, 0)."""
    half = len(inv_freq)
    table = np.empty((positions, 2 * half), F32)
    for first in range(0, positions, CHUNK):
        part = table[first : first + CHUNK]
        part[:, :half], part[:, half:] = 1, 0
        where = first + np.arange(len(part))
        part[:] = spec.rope(part, where, inv_freq, interleaved=False, amplitude=amplitude)
    return table


@cache
def make_angles(d: int, pairs: int):
    """A device function: angles(table, known, position, pair, cos, sin).

    Cosines and sines of `pairs` pairs from `pair` on; NaN for a position outside of the table.
    """
    half = d // 2

    @cuda.jit(device=True, inline="always")
    def angles(table, known, position, pair, cos, sin):
        if position >= 0 and position < known:
            row = int64(position) * d + pair
            for k in range(0, pairs, 4):
                cos[k], cos[k + 1], cos[k + 2], cos[k + 3] = ptx.ldg4_f(table, row + k)
                sin[k], sin[k + 1], sin[k + 2], sin[k + 3] = ptx.ldg4_f(table, row + half + k)
        else:
            for k in range(pairs):
                cos[k] = NAN
                sin[k] = NAN

    return angles


@cache
def make_turn(element, d: int):
    """A device function: turn(x, at, positions, token, table, known, pair, y, to).

    Turns four interleaved pairs of a row of d from x[at] into y[to]; pair is the first of them.
    """
    words, pairs = WORDS8[element], WIDTH // 2
    angles = make_angles(d, pairs)
    fetch, widen, store = fetch8[element], widen8[element], store8[element]

    @cuda.jit(device=True, inline="always")
    def turn(x, at, positions, token, table, known, pair, y, to):
        raw = cuda.local.array(words, uint32)
        values = cuda.local.array(WIDTH, float32)
        cos = cuda.local.array(pairs, float32)
        sin = cuda.local.array(pairs, float32)
        fetch(x, at, raw, 0)
        angles(table, known, positions[token], pair, cos, sin)
        widen(raw, 0, values, 0)
        for k in range(pairs):
            a, b = values[2 * k], values[2 * k + 1]
            values[2 * k] = a * cos[k] - b * sin[k]
            values[2 * k + 1] = a * sin[k] + b * cos[k]
        store(y, to, values, 0)

    return turn


@cache
def make(element, d: int, interleaved: bool, heads_each: int) -> Kernel:
    half = d // 2
    pairs = WIDTH // 2 if interleaved else WIDTH  # of a thread and a head
    pieces = half // pairs
    vectors = 1 if interleaved else 2  # of a thread and a head
    count, words = vectors * WIDTH, WORDS8[element]
    raw_count = heads_each * vectors * words
    angles = make_angles(d, pairs)
    fetch, widen, store = fetch8[element], widen8[element], store8[element]
    layout = "pairs" if interleaved else "halves"

    @kernel(
        threads=THREADS,
        name=f"rope_{d}_{layout}_{element}_{heads_each}",
        registers=128,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def rope_kernel(
        x: read(element),
        x_token: int64,
        x_head: int64,
        positions: read(int32),
        table: read(float32),
        known: int32,
        out: write(element),
        out_token: int64,
        out_head: int64,
        tokens: int32,
        heads: int32,
    ):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        token = i // pieces
        pair = (i - token * pieces) * pairs
        first = cuda.blockIdx.y * heads_each
        column = 2 * pair if interleaved else pair
        raw = cuda.local.array(raw_count, uint32)
        values = cuda.local.array(count, float32)
        cos = cuda.local.array(pairs, float32)
        sin = cuda.local.array(pairs, float32)
        read_token = min(token, tokens - 1)  # whole warps, as the barrier needs
        ptx.wait_for_previous()
        ptx.launch_next()
        for n in range(heads_each):
            at = read_token * x_token + min(first + n, heads - 1) * x_head + column
            for v in range(vectors):
                fetch(x, at + v * half, raw, (n * vectors + v) * words)
        position = positions[read_token]
        cuda.syncwarp()  # the compiler would let these loads wait behind the table's
        angles(table, known, position, pair, cos, sin)
        for n in range(heads_each):
            if token < tokens and first + n < heads:
                for v in range(vectors):
                    widen(raw, (n * vectors + v) * words, values, v * WIDTH)
                for k in range(pairs):
                    one = 2 * k if interleaved else k
                    other = one + (1 if interleaved else pairs)
                    a, b = values[one], values[other]
                    values[one] = a * cos[k] - b * sin[k]
                    values[other] = a * sin[k] + b * cos[k]
                at = token * out_token + (first + n) * out_head + column
                for v in range(vectors):
                    store(out, at + v * half, values, v * WIDTH)

    return rope_kernel


def rope(x, positions, table, interleaved: bool = True, *, out, stream=None):
    """x [T, d] or [T, heads, d] turned into out, which may be x; both may be views. Returns out."""
    tokens, d = x.shape[0], x.shape[-1]
    if x.ndim not in (2, 3):
        raise ValueError(f"x: shape {x.shape}, expected [T, d] or [T, heads, d]")
    if d % (WIDTH if interleaved else 2 * WIDTH):
        raise ValueError(f"x: {d} columns, expected a multiple of {WIDTH} in each half or row")
    require("positions", positions, (tokens,), "int32")
    require("table", table, (table.shape[0], d), "float32")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out: {out.dtype} {out.shape}, expected {x.dtype} {x.shape}")
    heads = x.shape[1] if x.ndim == 3 else 1
    leading = x.ndim - 1
    x_strides = (*strides_of("x", x, leading, WIDTH), 0)[:2]
    out_strides = (*strides_of("out", out, leading, WIDTH), 0)[:2]
    heads_each = HEADS if heads > 1 else 1
    body = make(element_of("x", x), d, interleaved, heads_each)
    pieces = d // (WIDTH if interleaved else 2 * WIDTH)
    grid = (-(-tokens * pieces // THREADS), -(-heads // heads_each))
    body.launch(
        grid,
        x,
        *x_strides,
        positions,
        table,
        len(table),
        out,
        *out_strides,
        tokens,
        heads,
        stream=stream,
    )
    return out


def instances() -> list[Kernel]:
    """Queries and keys of K2.6, its drafter, the embedded model and the embedded drafter."""
    made = [make(bf16, 64, True, 1), make(bf16, 64, True, HEADS), make(bf16, 128, False, HEADS)]
    made += [make(bf16, 128, False, 1)]  # one key head a rank
    for element in (bf16, float32):
        made += [make(element, 16, True, n) for n in (1, HEADS)]
        made += [make(element, 32, False, n) for n in (1, HEADS)]
    return made
