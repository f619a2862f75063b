"""The first pass of `draft_topk.py` over rows of draft logits, and the merge of shards."""

from functools import cache

from numba import cuda, float32, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.numerics import (
    ID_BITS,
    MASS_WEIGHT,
    NAN,
    float_of,
    id_of,
    log32,
    ordered,
)
from ddtree_numba.kernels.selection import usable
from ddtree_numba.kernels.vocabulary import MOST_WARPS, loader

THREADS = 256
MOST = 64  # k
MOST_MERGED = 1024  # keys of all shards of a row

# The state of a row: int64 words, all zero between calls
STATE = 4
TOTAL, OVERFLOW, ARRIVED, FIRST = range(STATE)


def each_of(vocabulary: int) -> int:
    """Tokens of a thread: a warp's greatest key is one of a few hundred of a row."""
    return 16 if vocabulary > 65_536 else 4


@cache
def make_maxima(element, aligned: bool, each: int, threads: int = THREADS) -> Kernel:
    """The greatest logit of every warp, and of the row."""
    load = loader(element, aligned, each)
    warps = threads // 32

    @kernel(
        threads=threads,
        name=f"draft_maxima_{element}_{each}{'' if aligned else '_odd'}",
        registers=40,
        opcodes=("REDUX",),
        pdl=True,
    )
    @cuda.jit
    def draft_maxima_kernel(
        logits: read(element),
        width: int32,
        first_id: int32,
        tops: update(int64),
        state: update(int64),
        maxima: update(int64),
    ):
        row, block, thread = cuda.blockIdx.y, cuda.blockIdx.x, cuda.threadIdx.x
        values = cuda.local.array(each, float32)
        shared = cuda.shared.array(MOST_WARPS, int64)
        for i in range(each):
            values[i] = NAN
        ptx.launch_next()
        ptx.wait_for_previous()
        load(logits, row, block, width, values)
        own = values[0]
        for i in range(1, each):
            own = ptx.fmax(own, values[i])
        order = int64(0)  # NaN comes last
        if own == own:
            order = ordered(own)
        top = int64(ptx.redux_max(order))
        if thread & 31 == 0:
            warp = thread >> 5
            maxima[(row * cuda.gridDim.x + block) * warps + warp] = top
            shared[warp] = top
        cuda.syncthreads()
        if thread == 0:
            for w in range(1, warps):
                top = max(top, shared[w])
            ptx.red_max_u64(tops, row, top << ID_BITS)
            if block == 0:
                state[row * STATE + FIRST] = first_id

    return draft_maxima_kernel


@cuda.jit(device=True, inline="always")
def log_sum_of(total):
    return log32(float32(max(total, 1)) * MASS_WEIGHT)


@cuda.jit(device=True, inline="always")
def log_prob(key, top, log_sum):
    """Log-probability of a key's logit; NaN where the row has no distribution."""
    result, greatest = NAN, float_of(top >> ID_BITS)
    if usable(top) and key >> ID_BITS > 0:
        result = (float_of(key >> ID_BITS) - greatest) - log_sum
    return result


@cache
def make_merge(threads: int = THREADS) -> Kernel:
    @kernel(threads=threads, name="draft_merge", registers=112, pdl=True)
    @cuda.jit
    def draft_merge_kernel(
        records: read(int64),
        tops: read(int64),
        shards: int32,
        k: int32,
        token_ids: write(int32),
        log_probs: write(float32),
    ):
        row, rows, thread = cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x
        shared = cuda.shared.array(MOST_MERGED, int64)
        ptx.launch_next()
        ptx.wait_for_previous()
        i, top, total = thread, int64(0), int64(0)
        while i < shards * k:
            shared[i] = records[(i // k * rows + row) * (k + 1) + i % k]
            i += threads
        i = 0
        while i < shards:
            top = max(top, tops[i * rows + row])
            total += records[(i * rows + row) * (k + 1) + k]
            i += 1
        cuda.syncthreads()
        log_sum = log_sum_of(total)
        i = thread
        while i < shards * k:
            key, rank, other = shared[i], 0, 0
            while other < shards * k:
                rank += shared[other] > key
                other += 1
            if rank < k and key > 0:
                token_ids[row * k + rank] = int32(id_of(key))
                log_probs[row * k + rank] = log_prob(key, top, log_sum)
            i += threads

    return draft_merge_kernel
