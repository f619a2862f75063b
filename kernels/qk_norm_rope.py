"""Norm and rotation of every head, in one launch; see `spec/qk_norm_rope.py`.

A lane has eight columns of a head, so a head of 128 takes half of a warp. The norm adds in the
order of `rms_norm` and has its bits; rounded, a head's halves change places between lanes, and each
lane rotates its own columns as `rope` does, by its table: a position outside of it gives NaN.
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.numerics import divided
from ddtree_numba.kernels.pieces import strides_of
from ddtree_numba.kernels.rms_norm import WARP, sum_of_lanes
from ddtree_numba.kernels.rope import make_angles
from ddtree_numba.kernels.vector import WIDTH, WORDS8, fetch8, put8, round8, widen8

THREADS = 128


def lanes_of(d: int) -> int:
    """Of a head; a power of two, so that no head lies in two warps."""
    return 1 << (d // WIDTH - 1).bit_length()


@cache
def make(element, d: int) -> Kernel:
    vectors, terms, half = d // WIDTH, np.float32(d), d // 2
    lanes = lanes_of(d)
    words = WORDS8[element]
    angles = make_angles(d, WIDTH)
    fetch, put, widen, round_once = (t[element] for t in (fetch8, put8, widen8, round8))

    @kernel(
        threads=THREADS,
        name=f"qk_norm_rope_{d}_{element}",
        registers=80,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def qk_norm_rope_kernel(
        joint: read(element),
        joint_token: int64,
        joint_head: int64,
        q_norm: read(element),
        k_norm: read(element),
        eps: float32,
        positions: read(int32),
        table: read(float32),
        known: int32,
        out: write(element),
        out_token: int64,
        out_head: int64,
        tokens: int32,
        heads: int32,
        queries: int32,
        turned: int32,
    ):
        i = int32((cuda.blockIdx.x * THREADS + cuda.threadIdx.x) // lanes)
        lane = int32(cuda.threadIdx.x % lanes)
        column = min(lane, vectors - 1) * WIDTH
        token, head = divided(i, heads)
        token = min(token, tokens - 1)  # whole warps, as the exchange needs
        weights = cuda.local.array(words, uint32)
        xs = cuda.local.array(words, uint32)
        others = cuda.local.array(words, uint32)
        values = cuda.local.array(WIDTH, float32)
        other = cuda.local.array(WIDTH, float32)
        cos = cuda.local.array(WIDTH, float32)
        sin = cuda.local.array(WIDTH, float32)
        if head < queries:
            fetch(q_norm, column, weights, 0)
        else:
            fetch(k_norm, column, weights, 0)
        ptx.launch_next()
        ptx.wait_for_previous()
        fetch(joint, token * joint_token + head * joint_head + column, xs, 0)
        position = positions[token]
        cuda.syncwarp()  # the compiler would let the head wait behind the table
        angles(table, known, position, column % half, cos, sin)
        widen(xs, 0, values, 0)
        square = float32(0)
        for k in range(WIDTH):
            square = square + values[k] * values[k]
        if lane >= vectors:
            square = float32(0)
        scale = float32(1) / math.sqrt(sum_of_lanes(square, lanes) / terms + eps)
        if head < turned:
            widen(weights, 0, other, 0)
            for k in range(WIDTH):
                values[k] = values[k] * scale * other[k]
            round_once(values, 0, xs, 0)
            widen(xs, 0, values, 0)
        partner = cuda.threadIdx.x & (WARP - lanes) | (lane + vectors // 2) % vectors
        for k in range(words):
            others[k] = ptx.shfl_idx(xs[k], partner)
        if head < turned:
            widen(others, 0, other, 0)
            for k in range(WIDTH):
                if column < half:
                    values[k] = values[k] * cos[k] - other[k] * sin[k]
                else:
                    values[k] = other[k] * sin[k] + values[k] * cos[k]
            round_once(values, 0, xs, 0)
        if i < tokens * heads and lane < vectors:
            put(out, token * out_token + head * out_head + column, xs, 0)

    return qk_norm_rope_kernel


def qk_norm_rope(
    joint,
    q_norm,
    k_norm,
    eps: float,
    positions,
    table,
    queries: int,
    keys: int,
    *,
    out,
    stream=None,
):
    """joint [T, N, d] into out, queries and keys normed and rotated; returns out.

    table: `rope_table`. Heads of joint and of out may lie apart; out may be joint.
    """
    tokens, heads, d = joint.shape
    if d % (2 * WIDTH) or d > WARP * WIDTH:
        raise ValueError(f"joint: heads of {d}, expected a multiple of {2 * WIDTH} up to 256")
    if not 0 <= queries <= queries + keys <= heads:
        raise ValueError(f"joint: {heads} heads, expected {queries} + {keys} or more")
    require("q_norm", q_norm, (d,), joint.dtype)
    require("k_norm", k_norm, (d,), joint.dtype)
    require("positions", positions, (tokens,), "int32")
    require("table", table, (len(table), d), "float32")
    if out.shape != joint.shape or out.dtype != joint.dtype:
        raise ValueError(f"out: {out.dtype} {out.shape}, expected {joint.dtype} {joint.shape}")
    places = *strides_of("joint", joint, 2, WIDTH), *strides_of("out", out, 2, WIDTH)
    body = make(element_of("joint", joint), d)
    body.launch(
        -(-tokens * heads // (THREADS // lanes_of(d))),
        *(joint, *places[:2], q_norm, k_norm, eps, positions, table, len(table)),
        *(out, *places[2:], tokens, heads, queries, queries + keys),
        stream=stream,
    )
    return out


def instances() -> list[Kernel]:
    """The drafter's heads, of K2.6 and of the embedded model."""
    return [make(bf16, 128), make(bf16, 32)]
