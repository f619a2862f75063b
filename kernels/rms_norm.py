"""RMS norm on the device, alone or behind the residual sum; see `spec/rms_norm.py`.

One block a row, which stays in registers between the two passes. A lane adds its squares in order,
then lanes and warps by halves: an order that the width alone decides.
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, rows_of, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.vector import WIDTH, load8, rounded, store8

WARP = 32
VECTORS = 512  # of a row before a thread takes two: 3 blocks of 448 threads fit sm_120's 1,536


@cuda.jit(device=True, inline="always")
def warp_sum(value):
    """The sum over a warp, in every lane."""
    step = 16
    while step > 0:
        value = value + ptx.shfl_xor_f(value, step)
        step >>= 1
    return value


@cache
def make(width: int, element, weight_element, residual: bool) -> Kernel:
    vectors = width // WIDTH
    each = -(-vectors // VECTORS)  # vectors of a thread
    warps = -(-vectors // (each * WARP))
    threads = warps * WARP
    count = each * WIDTH
    even = threads * count == width
    terms = np.float32(width)
    load, load_weight, store = load8[element], load8[weight_element], store8[element]
    round_once = rounded[element]
    suffix = "_residual" if residual else ""

    @kernel(
        threads=threads,
        name=f"rms_norm_{width}_{element}_{weight_element}{suffix}",
        registers=64,
        opcodes=("LDG.E.128", "STG.E.128"),
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
    ):
        row, thread = cuda.blockIdx.x, cuda.threadIdx.x
        values = cuda.local.array(count, float32)
        other = cuda.local.array(WIDTH, float32)
        for n in range(each):  # all loads first, so that they are under way together
            column = (thread + n * threads) * WIDTH
            if even or column < width:
                load(x, row * stride + column, values, n * WIDTH)
            else:
                for i in range(WIDTH):
                    values[n * WIDTH + i] = float32(0)
        if residual:
            for n in range(each):
                column = (thread + n * threads) * WIDTH
                if even or column < width:
                    load(addend, row * width + column, other, 0)
                    for i in range(WIDTH):
                        k = n * WIDTH + i
                        values[k] = round_once(values[k] + other[i])
                    store(total, row * width + column, values, n * WIDTH)
        square = float32(0)
        for k in range(count):
            square = square + values[k] * values[k]
        square = warp_sum(square)
        if warps > 1:
            sums = cuda.shared.array(WARP, float32)
            if thread & 31 == 0:
                sums[thread >> 5] = square
            cuda.syncthreads()
            square = float32(0)
            if thread & 31 < warps:
                square = sums[thread & 31]
            square = warp_sum(square)
        scale = float32(1) / math.sqrt(square / terms + eps)
        for n in range(each):
            column = (thread + n * threads) * WIDTH
            if even or column < width:
                load_weight(weight, column, other, 0)
                for i in range(WIDTH):
                    k = n * WIDTH + i
                    values[k] = values[k] * scale * other[i]
                store(y, row * width + column, values, n * WIDTH)

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
    body.launch(rows, x, stride, residual, weight, y, total, eps, stream=stream)
    return out


def instances() -> list[Kernel]:
    """Hidden, query and latent rows of K2.6, the drafter's heads, the embedded model's rows."""
    alone = [7168, 1536, 512, 128, 192, 96, 64, 32]
    made = [make(width, bf16, bf16, False) for width in alone]
    made += [make(width, bf16, bf16, True) for width in (7168, 192)]
    return made + [make(width, float32, float32, True) for width in (7168, 192)]
