"""Token embedding on the device; see `spec/embed.py`.

A block copies a part of one row, four pieces a thread: with one, 28,672 blocks of 4,096 rows follow
each other so closely that the next launch, where it may start early, is in their way.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.vector import WIDTH, WORDS8, fetch8, put8, round8, widen8

THREADS, EACH = 128, 4  # 2 blocks share a row of 7,168
STEP = THREADS * WIDTH


@cache
def make(stored, result) -> Kernel:
    fetch, widen, round_once, put = fetch8[stored], widen8[stored], round8[result], put8[result]
    words, out_words = WORDS8[stored], WORDS8[result]
    count = EACH * words

    @kernel(
        threads=THREADS,
        name=f"embed_{stored}_{result}",
        registers=64,
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
        ptx.launch_next()
        ptx.wait_for_previous()
        token = cuda.blockIdx.x
        first = cuda.blockIdx.y * (EACH * STEP) + cuda.threadIdx.x * WIDTH
        loaded = cuda.local.array(count, uint32)
        rounded = cuda.local.array(out_words, uint32)
        values = cuda.local.array(WIDTH, float32)
        row = token_ids[token] - first_row
        here = row >= 0 and row < rows
        for n in range(EACH):
            for i in range(words):
                loaded[n * words + i] = 0
            if here and first + n * STEP < width:
                fetch(table, row * width + first + n * STEP, loaded, n * words)
        for n in range(EACH):
            if first + n * STEP < width:
                widen(loaded, n * words, values, 0)
                round_once(values, 0, rounded, 0)
                put(out, token * width + first + n * STEP, rounded, 0)

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
    grid = (tokens, -(-width // (EACH * STEP)))
    body.launch(grid, token_ids, table, out, first_row, rows, width, stream=stream)
    return out


def instances() -> list[Kernel]:
    """Of K2.6 and the embedded model; float32 for comparison with other implementations."""
    return [make(bf16, bf16), make(bf16, float32), make(float32, float32)]
