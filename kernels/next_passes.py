"""The passes of `next_token.py` over rows of logits: argmax, race, merge of shards."""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.noise import exponential, random_words
from ddtree_numba.kernels.numerics import (
    ID_BITS,
    exp32,
    float_of,
    id_of,
    key_of,
    log32,
    ordered,
)
from ddtree_numba.kernels.selection import (
    ARRIVED,
    EACH,
    FLOOR,
    STATE,
    TOP,
    WINNER,
    scale,
    usable,
)
from ddtree_numba.kernels.vocabulary import QUAD, THREADS, arrive, block_max, column_of, loader

NOT_A_TOKEN = 0xFFFFFFFF  # above every order: a NaN, or a maximum of +inf
NOTHING = float32(-np.inf)


@cuda.jit(device=True, inline="always")
def token_of(key):
    """The winner's id; -1 if the row holds no distribution."""
    token = int32(-1)
    if usable(key):
        token = int32(id_of(key))
    return token


@cache
def make(
    element, aligned: bool, kind: str, sharded: bool = False, threads: int = THREADS
) -> Kernel:
    """One pass over the rows. kind: "greedy" takes the greatest key; "top" keeps it for the passes
    behind; "race" draws among all tokens, "filtered" among those that stay. A shard gives its
    winner's key instead of a token."""
    load = loader(element, aligned, EACH)
    drawn, filtered, final = kind in ("race", "filtered"), kind == "filtered", kind != "top"
    cell = WINNER if final else TOP
    suffix = ("_shard" if sharded else "") + ("" if aligned else "_odd")

    @cuda.jit(device=True, inline="always")
    def score(logit, key, word, temperature, floor, greatest, min_p):
        """What a token enters the race with; -inf where a filter has taken it out."""
        scaled, stays, result = scale(logit, temperature), True, NOTHING
        if filtered:
            stays = key >= floor
            if min_p > float32(0) and stays:
                stays = exp32(scaled - greatest) >= min_p
        if stays:
            result = scaled - log32(exponential(word))
        return result

    @kernel(
        threads=threads,
        name=f"next_token_{kind}_{element}{suffix}",
        registers=64,
        opcodes=("REDUX",),
        pdl=True,
    )
    @cuda.jit
    def next_token_kernel(
        logits: read(element),
        width: int32,
        first_id: int32,
        positions: read(int64),
        seeds: read(uint64),
        temperatures: read(float32),
        min_ps: read(float32),
        state: update(int64),
        keys: write(int64),
        out: write(int32),
    ):
        row = cuda.blockIdx.y
        base = row * STATE
        values = cuda.local.array(EACH, float32)
        words = cuda.local.array(QUAD, uint32)
        ptx.launch_next()
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
                    block = (first_id + column) // QUAD
                    random_words(seeds[row], positions[row], block, words, 0)
                for i in range(QUAD):
                    if column + i < width:
                        x = values[n + i]
                        order = int64(NOT_A_TOKEN)
                        if x == x and x < -NOTHING:
                            if drawn and temperature > float32(0) and x > NOTHING:
                                key = key_of(ordered(x), column + i)
                                x = score(x, key, words[i], temperature, floor, greatest, min_p)
                            order = ordered(x)
                        best = max(best, key_of(order, first_id + column + i))
        best = block_max(best)
        if cuda.threadIdx.x == 0:
            ptx.red_max_u64(state, base + cell, best)
        if final:
            last = arrive(state, base + ARRIVED)
            if last and cuda.threadIdx.x == 0:
                best = state[base + WINNER]
                if sharded:
                    keys[row] = best
                else:
                    out[row] = token_of(best)
                for n in range(STATE):  # all of them: a call of other rows has bins there
                    state[base + n] = 0

    return next_token_kernel


@cache
def make_merge() -> Kernel:
    @kernel(threads=THREADS, name="next_token_merge", registers=32, pdl=True)
    @cuda.jit
    def next_token_merge_kernel(keys: read(int64), shards: int32, rows: int32, out: write(int32)):
        row = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        ptx.launch_next()
        ptx.wait_for_previous()
        if row < rows:
            best, i = int64(0), 0
            while i < shards:
                best = max(best, keys[i * rows + row])
                i += 1
            out[row] = token_of(best)

    return next_token_merge_kernel
