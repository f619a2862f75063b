"""SwiGLU on the device; see `spec/swiglu.py`. A thread gates eight columns of one row.

Rows share blocks, so that narrow ones fill them too.
"""

import math
from functools import cache

from numba import cuda, float32, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.vector import WIDTH, load8, store8

THREADS = 128


@cuda.jit(device=True, inline="always")
def silu_and_mul(gate, up):
    """silu(gate) * up."""
    return gate / (float32(1) + math.exp(-gate)) * up


@cache
def make(element, half: int) -> Kernel:
    pieces = half // WIDTH
    load, store = load8[element], store8[element]

    @kernel(
        threads=THREADS,
        name=f"swiglu_{half}_{element}",
        registers=48,
        opcodes=("LDG.E.128",),
        pdl=True,
    )
    @cuda.jit
    def swiglu_kernel(gate_up: read(element), out: write(element), rows: int32):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row = i // pieces
        column = (i - row * pieces) * WIDTH
        ptx.wait_for_previous()
        ptx.launch_next()
        if row < rows:
            gate = cuda.local.array(WIDTH, float32)
            up = cuda.local.array(WIDTH, float32)
            load(gate_up, row * 2 * half + column, gate, 0)
            load(gate_up, (row * 2 + 1) * half + column, up, 0)
            for i in range(WIDTH):
                up[i] = silu_and_mul(gate[i], up[i])
            store(out, row * half + column, up, 0)

    return swiglu_kernel


def swiglu(gate_up, *, out, stream=None):
    """silu(gate) * up into out; returns out."""
    *leading, width = gate_up.shape
    require("gate_up", gate_up, (*leading, width))
    if width % (2 * WIDTH):
        raise ValueError(f"gate_up: rows of {width}, expected a multiple of {2 * WIDTH}")
    half = width // 2
    require("out", out, (*leading, half), gate_up.dtype)
    rows = math.prod(leading)
    grid = -(-rows * (half // WIDTH) // THREADS)
    make(element_of("gate_up", gate_up), half).launch(grid, gate_up, out, rows, stream=stream)
    return out


def instances() -> list[Kernel]:
    """Dense layer and shared expert of K2.6 in eight parts, the embedded model's, its drafter's."""
    return [make(bf16, half) for half in (2304, 512, 256)] + [make(float32, n) for n in (512, 256)]
