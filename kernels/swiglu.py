"""SwiGLU on the device; see `spec/swiglu.py`. A thread gates eight columns of one row."""

import math
from functools import cache

from numba import cuda, float32, int32

from ddtree_numba.kernels.arguments import bf16, element_of, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.vector import WIDTH, load8, store8

THREADS = 96  # 2,304 columns of K2.6's dense layer are 3 full blocks


@cache
def make(element) -> Kernel:
    load, store = load8[element], store8[element]

    @kernel(threads=THREADS, name=f"swiglu_{element}", registers=48, opcodes=("LDG.E.128",))
    @cuda.jit
    def swiglu_kernel(gate_up: read(element), out: write(element), half: int32):
        row = cuda.blockIdx.x
        column = (cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * WIDTH
        if column < half:
            gate = cuda.local.array(WIDTH, float32)
            up = cuda.local.array(WIDTH, float32)
            load(gate_up, row * 2 * half + column, gate, 0)
            load(gate_up, (row * 2 + 1) * half + column, up, 0)
            for i in range(WIDTH):
                up[i] = gate[i] / (float32(1) + math.exp(-gate[i])) * up[i]
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
    grid = (math.prod(leading), -(-half // (WIDTH * THREADS)))
    make(element_of("gate_up", gate_up)).launch(grid, gate_up, out, half, stream=stream)
    return out


def instances() -> list[Kernel]:
    return [make(bf16), make(float32)]
