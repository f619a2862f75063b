"""RMS norm on the device, alone or behind the residual sum; see `spec/rms_norm.py`.

A wide row has a block; narrow rows share one, a warp or two each. A row stays in registers between
the two passes, as it lies in memory, and so does the weight. A lane adds its squares in order, then
lanes and warps by halves: an order that the width alone decides.

All loads are under way before the first is needed: cold, each round of them costs half a
microsecond. The weight's do not wait for the kernels ahead on the stream, which must not write it.
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, rows_of, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.vector import WIDTH, WORDS8, fetch8, put8, round8, widen8

WARP = 32
VECTORS = 512  # of a row before a thread takes two: 3 blocks of 448 threads fit sm_120's 1,536
NARROW = 192  # vectors of the widest row that shares its block: of WARPS warps, up to EACH a thread
EACH, WARPS = 3, 4


@cuda.jit(device=True, inline="always")
def sum_of_lanes(value, lanes):
    """The sum over a warp's groups of so many neighbours, a power of two, in each of them."""
    step = lanes // 2
    while step > 0:
        value = value + ptx.shfl_xor_f(value, step)
        step >>= 1
    return value


@cuda.jit(device=True, inline="always")
def warp_sum(value):
    """The sum over a warp, in every lane."""
    return sum_of_lanes(value, WARP)


def shape_of(width: int) -> tuple[int, int, int]:
    """Vectors of a thread, warps of a row, rows of a block."""
    vectors = width // WIDTH
    if vectors > NARROW:
        each = -(-vectors // VECTORS)
        return each, -(-vectors // (each * WARP)), 1
    warps = -(-vectors // (EACH * WARP))
    return -(-vectors // (warps * WARP)), warps, WARPS // warps


@cache
def make(width: int, element, weight_element, residual: bool) -> Kernel:
    each, warps, rows_each = shape_of(width)
    lanes = warps * WARP
    even = lanes * each * WIDTH == width
    terms = np.float32(width)
    words, weight_words = WORDS8[element], WORDS8[weight_element]
    count, weight_count = each * words, each * weight_words
    fetch, put, widen, round_once = (t[element] for t in (fetch8, put8, widen8, round8))
    fetch_weight, widen_weight = fetch8[weight_element], widen8[weight_element]
    suffix = "_residual" if residual else ""

    @kernel(
        threads=lanes * rows_each,
        name=f"rms_norm_{width}_{element}_{weight_element}{suffix}",
        registers=80,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def rms_norm_kernel(
        x: read(element),
        stride: int64,
        addend: read(element),
        weight: read(weight_element),
        y: write(element),
        total: write(element),
        eps: float32,
        rows: int32,
    ):
        row, part, lane = cuda.blockIdx.x, 0, cuda.threadIdx.x
        if rows_each > 1:
            part, lane = cuda.threadIdx.x // lanes, cuda.threadIdx.x % lanes
            row = cuda.blockIdx.x * rows_each + part
        here = rows_each == 1 or row < rows
        xs = cuda.local.array(count, uint32)
        others = cuda.local.array(count, uint32)
        weights = cuda.local.array(weight_count, uint32)
        values = cuda.local.array(WIDTH, float32)
        other = cuda.local.array(WIDTH, float32)
        for n in range(each):
            column = (lane + n * lanes) * WIDTH
            if even or column < width:
                fetch_weight(weight, column, weights, n * weight_words)
        ptx.launch_next()
        ptx.wait_for_previous()
        for n in range(each):
            column = (lane + n * lanes) * WIDTH
            if here and (even or column < width):
                fetch(x, row * stride + column, xs, n * words)
                if residual:
                    fetch(addend, row * width + column, others, n * words)
            else:
                for i in range(words):
                    xs[n * words + i] = 0
        square = float32(0)
        for n in range(each):
            column = (lane + n * lanes) * WIDTH
            widen(xs, n * words, values, 0)
            if residual and here and (even or column < width):
                widen(others, n * words, other, 0)
                for i in range(WIDTH):
                    values[i] = values[i] + other[i]
                round_once(values, 0, xs, n * words)
                put(total, row * width + column, xs, n * words)
                widen(xs, n * words, values, 0)
            for i in range(WIDTH):
                square = square + values[i] * values[i]
        square = warp_sum(square)
        if warps > 1:
            sums = cuda.shared.array(WARP, float32)
            if lane & 31 == 0:
                sums[part * warps + (lane >> 5)] = square
            cuda.syncthreads()
            square = float32(0)
            if lane & 31 < warps:
                square = sums[part * warps + (lane & 31)]
            square = warp_sum(square)
        scale = float32(1) / math.sqrt(square / terms + eps)
        for n in range(each):
            column = (lane + n * lanes) * WIDTH
            if here and (even or column < width):
                widen(xs, n * words, values, 0)
                widen_weight(weights, n * weight_words, other, 0)
                for i in range(WIDTH):
                    values[i] = values[i] * scale * other[i]
                round_once(values, 0, xs, n * words)
                put(y, row * width + column, xs, n * words)

    return rms_norm_kernel


def rms_norm(x, weight, eps: float, residual=None, *, out, stream=None):
    """y into out, or y and x + residual into the pair out; returns out.

    Rows of x may lie apart; y may be x, and the sum x or the residual.
    """
    rows, width, stride = rows_of("x", x)
    require("weight", weight, (width,))
    if width % WIDTH or stride % WIDTH:
        raise ValueError(f"x: rows of {width}, {stride} apart, expected multiples of {WIDTH}")
    y, total = (out, None) if residual is None else out
    require("out", y, x.shape, x.dtype)
    if residual is not None:
        require("residual", residual, x.shape, x.dtype)
        require("out", total, x.shape, x.dtype)
    kinds = element_of("x", x), element_of("weight", weight)
    body = make(width, *kinds, residual is not None)
    _, _, rows_each = shape_of(width)
    grid = -(-rows // rows_each)
    body.launch(grid, x, stride, residual, weight, y, total, eps, rows, stream=stream)
    return out


def instances() -> list[Kernel]:
    """Hidden, query and latent rows of K2.6, the drafter's heads, the embedded model's rows."""
    alone = [7168, 1536, 512, 128, 192, 96, 64, 32]
    made = [make(width, bf16, bf16, False) for width in alone]
    made += [make(width, bf16, bf16, True) for width in (7168, 192)]
    return made + [make(width, float32, float32, True) for width in (7168, 192)]
