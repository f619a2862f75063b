"""The token that follows each row of logits; see `spec/next_token.py`.

Greedy rows take one launch: the greatest key of a row, over all its blocks. Rows that are drawn
without filters take one as well, the race. With filters, the greatest key comes first, then
top-k and top-p each narrow down the lowest key that stays (`selection.py`), then the race.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from ddtree_numba.kernels import ptx, selection
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, update, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.noise import exponential, random_words
from ddtree_numba.kernels.numerics import (
    ID_BITS,
    LAST_ID,
    exp32,
    float_of,
    id_of,
    key_of,
    log32,
    ordered,
)
from ddtree_numba.kernels.row_settings import Settings
from ddtree_numba.kernels.selection import (
    ARRIVED,
    EACH,
    FLOOR,
    LEVEL_BITS,
    STATE,
    TOP,
    WINNER,
    scale,
    usable,
)
from ddtree_numba.kernels.vocabulary import (
    QUAD,
    THREADS,
    arrive,
    block_max,
    blocks_of,
    column_of,
    loader,
)

NOT_A_TOKEN = 0xFFFFFFFF  # above every order: a NaN, or a maximum of +inf
NOTHING = float32(-np.inf)


@cache
def make(element, aligned: bool, kind: str, threads: int = THREADS) -> Kernel:
    """One pass over the rows. kind: "greedy" writes tokens; "top" keeps each row's greatest key for
    the passes behind it; "race" draws among all tokens, "filtered" among those that stay."""
    load = loader(element, aligned, EACH)
    drawn, filtered, final = kind in ("race", "filtered"), kind == "filtered", kind != "top"
    cell = WINNER if final else TOP

    @kernel(
        threads=threads,
        name=f"next_token_{kind}_{element}{'' if aligned else '_odd'}",
        registers=64,
        opcodes=("REDUX",),
        pdl=True,
    )
    @cuda.jit
    def next_token_kernel(
        logits: read(element),
        width: int32,
        positions: read(int64),
        seeds: read(uint64),
        temperatures: read(float32),
        min_ps: read(float32),
        state: update(int64),
        out: write(int32),
    ):
        row = cuda.blockIdx.y
        base = row * STATE
        values = cuda.local.array(EACH, float32)
        words = cuda.local.array(QUAD, uint32)
        ptx.wait_for_previous()
        load(logits, row, cuda.blockIdx.x, width, values)
        best, temperature = int64(0), float32(0)
        top, floor, greatest, min_p = int64(0), int64(0), float32(0), float32(0)
        if drawn:
            temperature = temperatures[row]
        if filtered:
            top, floor, min_p = state[base + TOP], state[base + FLOOR], min_ps[row]
            greatest = scale(float_of(top >> ID_BITS), temperature)
        for n in range(0, EACH, QUAD):
            column = column_of(cuda.blockIdx.x, n, EACH)
            if column < width:
                if drawn and temperature > float32(0):
                    random_words(seeds[row], positions[row], column // QUAD, words, 0)
                for i in range(QUAD):
                    if column + i < width:
                        x = values[n + i]
                        score = x
                        if not (x == x and x < -NOTHING):
                            order = int64(NOT_A_TOKEN)
                        else:
                            if drawn and temperature > float32(0) and x > NOTHING:
                                score = scale(x, temperature)
                                stays = True
                                if filtered:
                                    stays = key_of(ordered(x), column + i) >= floor
                                    if min_p > float32(0) and stays:
                                        stays = exp32(score - greatest) >= min_p
                                if not stays:
                                    score = NOTHING
                                else:
                                    score -= log32(exponential(words[i]))
                            order = ordered(score)
                        best = max(best, key_of(order, column + i))
        best = block_max(best)
        if cuda.threadIdx.x == 0:
            ptx.atom_max_u64(state, base + cell, best)
        if final:
            last = arrive(state, base + ARRIVED)
            if last and cuda.threadIdx.x == 0:
                best = state[base + WINNER]
                token = int32(-1)
                if usable(best):
                    token = int32(id_of(best))
                out[row] = token
                state[base + TOP] = 0
                state[base + WINNER] = 0
                state[base + FLOOR] = 0

    return next_token_kernel


@dataclass(frozen=True)
class Shape:
    """Threads of a block, bins (2**bits) of a selecting launch: tokens are the same for all."""

    threads: int = THREADS
    bits: int = LEVEL_BITS


def workspace_words(rows: int, filters: bool, shape: Shape = Shape()) -> int:
    """int64 words of a workspace for so many rows; it starts as zeros and is left as zeros."""
    return rows * (STATE + (1 << shape.bits if filters else 0))


def next_token(
    logits, positions, seeds, params: Settings, *, workspace, out, shape=Shape(), stream=None
):
    """The next token of each row into out, -1 where the row holds no distribution; returns out."""
    rows, width = logits.shape
    require("logits", logits, (rows, width))
    require("positions", positions, (rows,), "int64")
    require("seeds", seeds, (rows,), "uint64")
    require("out", out, (rows,), "int32")
    if not 0 < width <= LAST_ID:
        raise ValueError(f"logits: {width} tokens, expected 1 .. {LAST_ID}")
    filters = params.ranked or params.massed
    least = workspace_words(rows, filters, shape)
    require("workspace", workspace, (max(len(workspace), least),), "int64")
    element, aligned = element_of("logits", logits), width % QUAD == 0
    grid = (blocks_of(width, shape.threads, EACH), rows)
    given = (logits, width, positions, seeds, params.temperature, params.min_p, workspace, out)

    def run(kind: str) -> None:
        make(element, aligned, kind, shape.threads).launch(grid, *given, stream=stream)

    if not params.sampled:
        run("greedy")
    elif not (filters or params.cut):
        run("race")
    else:
        run("top")
        for weighted in [False] * params.ranked + [True] * params.massed:
            body = selection.make(element, aligned, weighted, shape.threads, shape.bits)
            for level in range(selection.levels(shape.bits)):
                body.launch(
                    grid,
                    logits,
                    width,
                    rows,
                    level,
                    params.temperature,
                    params.top_k,
                    params.share,
                    workspace,
                    stream=stream,
                )
        run("filtered")
    return out


def instances() -> list[Kernel]:
    """float32 logits are the product's."""
    made = [make(float32, True, kind) for kind in ("greedy", "top", "race", "filtered")]
    made += [selection.make(float32, True, weighted) for weighted in (False, True)]
    return made + [make(bf16, True, "greedy")]
