"""Token embedding on the device; see `spec/embed.py`. A block copies a piece of one row."""

from functools import cache

from numba import cuda, float32, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.vector import WIDTH, load8, store8

THREADS = 128  # 7 blocks share a row of 7,168


@cache
def make(stored, result) -> Kernel:
    load, store = load8[stored], store8[result]

    @kernel(
        threads=THREADS,
        name=f"embed_{stored}_{result}",
        registers=32,
        opcodes=("LDG.E.128",),
        pdl=True,
    )
    @cuda.jit
    def embed_kernel(
        token_ids: read(int32),
        table: read(stored),
        out: write(result),
        first_row: int64,
        rows: int32,
        width: int32,
    ):
        ptx.wait_for_previous()
        ptx.launch_next()
        token = cuda.blockIdx.x
        column = (cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * WIDTH
        if column < width:
            values = cuda.local.array(WIDTH, float32)
            for i in range(WIDTH):
                values[i] = float32(0)
            row = token_ids[token] - first_row
            if row >= 0 and row < rows:
                load(table, row * width + column, values, 0)
            store(out, token * width + column, values, 0)

    return embed_kernel


def embed(token_ids, table, first_row: int = 0, *, out, stream=None):
    """out[t] = table[token_ids[t] - first_row] in out's dtype, or zeros; returns out."""
    tokens, (rows, width) = len(token_ids), table.shape
    require("token_ids", token_ids, (tokens,), "int32")
    require("table", table, (rows, width))
    require("out", out, (tokens, width))
    if width % WIDTH:
        raise ValueError(f"table: rows of {width}, expected a multiple of {WIDTH}")
    body = make(element_of("table", table), element_of("out", out))
    grid = (tokens, -(-width // (WIDTH * THREADS)))
    body.launch(grid, token_ids, table, out, first_row, rows, width, stream=stream)
    return out


def instances() -> list[Kernel]:
    """Of K2.6 and the embedded model; float32 for comparison with other implementations."""
    return [make(bf16, bf16), make(bf16, float32), make(float32, float32)]
