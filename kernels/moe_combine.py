"""The picks of a token, summed in their order: out = round(w_0 y_0 + w_1 y_1 + .. + base).

A thread takes eight columns of a token; all its loads are under way together. The rows of y may
hold a part of the columns, the one from `first` on. A padding pick adds nothing, and neither what
lies in its place nor its weight is looked at.
"""

from functools import cache

from numba import cuda, float32, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, update
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.numerics import divided
from ddtree_numba.kernels.vector import WIDTH, load8, store8

THREADS = 128


@cache
def make(picks: int, with_base: bool) -> Kernel:
    terms = picks * WIDTH
    load, load_base, store = load8[float32], load8[bf16], store8[bf16]

    @kernel(
        threads=THREADS,
        name=f"moe_combine_{picks}{'_base' if with_base else ''}",
        registers=128,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def combine_kernel(
        y: read(float32),
        picked: read(int32),
        weights: read(float32),
        base: read(bf16),
        out: update(bf16),
        experts: int32,
        rows: int32,
        width: int32,
        part: int32,
        first: int32,
    ):
        """y: [rows * picks, part]; out, base: [rows, width], `part` columns at a time."""
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        pieces = part >> 3  # WIDTH is 8
        token, piece = divided(i, pieces)
        column = piece * WIDTH
        values = cuda.local.array(terms, float32)
        shares = cuda.local.array(picks, float32)
        chosen = cuda.local.array(picks, int32)
        total = cuda.local.array(WIDTH, float32)
        if token < rows:
            for j in range(picks):
                chosen[j] = picked[token * picks + j]
                shares[j] = weights[token * picks + j]
        ptx.launch_next()
        ptx.wait_for_previous()
        if token < rows:
            for j in range(picks):
                load(y, (token * picks + j) * part + column, values, j * WIDTH)
            if with_base:
                load_base(base, token * width + first + column, total, 0)
            for n in range(WIDTH):
                z = float32(0)
                for j in range(picks):
                    if chosen[j] >= 0 and chosen[j] < experts:
                        z = z + shares[j] * values[j * WIDTH + n]
                if with_base:
                    z = z + total[n]
                total[n] = z
            store(out, token * width + first + column, total, 0)

    return combine_kernel


def instances() -> list[Kernel]:
    return [make(picks, base) for picks in (8, 4) for base in (False, True)]
