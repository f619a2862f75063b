"""Projection and SwiGLU on the device; see `spec/linear_swiglu.py`.

Where `linear` cuts K into parts, the kernel here adds their sums in its order, rounds gate and up
to bfloat16 as it does, and gates them at once: a launch and a way through memory less. A thread has
four columns of gate and of up. Where K is in one part, gate and up are stored and `swiglu` follows.
The bits are those of `linear` and `swiglu` either way.
"""

from functools import cache

from numba import cuda, float32, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.linear import Way, linear, product, rows_through, way_of
from ddtree_numba.kernels.swiglu import silu_and_mul, swiglu
from ddtree_numba.kernels.vector import WIDTH, rounded
from ddtree_numba.spec.numerics import BF16, F32

THREADS = 64
EACH = 4  # columns of a thread: loads of 16 bytes
AT_ONCE = 4  # parts whose loads are under way together
HELD = AT_ONCE * EACH


@cache
def make(half: int) -> Kernel:
    pieces = half // EACH
    round_once = rounded[bf16]

    @kernel(
        threads=THREADS,
        name=f"sum_swiglu_{half}",
        registers=80,
        opcodes=("LDG.E.128", "STG.E.64"),
        pdl=True,
    )
    @cuda.jit
    def sum_swiglu_kernel(parts: read(float32), out: write(bf16), rows: int32, number: int32):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row = i // pieces
        column = (i - row * pieces) * EACH
        ptx.launch_next()
        ptx.wait_for_previous()
        if row < rows:
            gate = cuda.local.array(EACH, float32)
            up = cuda.local.array(EACH, float32)
            gates = cuda.local.array(HELD, float32)
            ups = cuda.local.array(HELD, float32)
            apart = int64(rows) * 2 * half
            at = int64(row) * 2 * half + column
            n = int32(0)
            while n < number:
                for k in range(AT_ONCE):
                    if n + k < number:
                        j = k * EACH
                        place = at + (n + k) * apart
                        gates[j], gates[j + 1], gates[j + 2], gates[j + 3] = ptx.ldg4_f(
                            parts, place
                        )
                        ups[j], ups[j + 1], ups[j + 2], ups[j + 3] = ptx.ldg4_f(parts, place + half)
                for k in range(AT_ONCE):
                    if n + k == 0:
                        for j in range(EACH):
                            gate[j], up[j] = gates[j], ups[j]
                    elif n + k < number:
                        for j in range(EACH):
                            gate[j] = ptx.add(gate[j], gates[k * EACH + j])
                            up[j] = ptx.add(up[j], ups[k * EACH + j])
                n = int32(n + AT_ONCE)
            for j in range(EACH):
                up[j] = silu_and_mul(round_once(gate[j]), round_once(up[j]))
            low, high = ptx.pack_bf16(up[1], up[0]), ptx.pack_bf16(up[3], up[2])
            ptx.stg2(out, int64(row) * half + column, low, high)

    return sum_swiglu_kernel


def workspace(tokens: int, outs: int, width: int) -> tuple[tuple[int, ...], type]:
    """Shape and dtype of the workspace: the parts' sums, or gate and up."""
    parts = way_of(tokens, outs, width).parts
    return ((parts, tokens, outs), F32) if parts > 1 else ((tokens, outs), BF16)


def linear_swiglu(x, weight, *, out, workspace, stream=None, way: Way | None = None):
    """swiglu of x[T, K] times weight[2 I, K] transposed, into out[T, I]; returns out.

    Rows of x may lie apart. way: as `linear` takes it; the workspace is float32[parts, T, 2 I] if
    it has parts, else bfloat16[T, 2 I].
    """
    tokens, width, _ = rows_through(x, weight)
    outs = len(weight)
    half = outs // 2
    if outs % (2 * WIDTH):
        raise ValueError(f"weight: {outs} rows, expected a multiple of {2 * WIDTH}")
    require("out", out, (tokens, half), BF16)
    way = way or way_of(tokens, outs, width)
    if way.parts == 1:
        require("workspace", workspace, (tokens, outs), BF16)
        linear(x, weight, out=workspace, stream=stream, way=way)
        return swiglu(workspace, out=out, stream=stream)
    require("workspace", workspace, (way.parts, tokens, outs), F32)
    product(x, weight, way, workspace, stream)
    grid = -(-tokens * (half // EACH) // THREADS)
    make(half).launch(grid, workspace, out, tokens, way.parts, stream=stream)
    return out


def instances() -> list[Kernel]:
    """Shared expert of K2.6 at eight and four ranks; at two, for 73 to 128 rows."""
    return [make(half) for half in (256, 512, 1024)]
