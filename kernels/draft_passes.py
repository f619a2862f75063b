"""The passes of `draft_topk.py` over rows of draft logits: candidates, finish, merge of shards."""

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
    key_of,
    log32,
    mass,
    ordered,
)
from ddtree_numba.kernels.selection import usable
from ddtree_numba.kernels.thinning import thinner
from ddtree_numba.kernels.vocabulary import arrive, column_of, loader

THREADS = 256
EACH = 16  # tokens of a thread
LISTED = 128  # keys that a block may append: a few more than k
MOST = 64  # k
MOST_MERGED = 1024  # keys of all shards of a row

# The state of a row: int64 words, all zero between calls
STATE = 4
TOTAL, COUNT, ARRIVED = range(3)


@cache
def make_candidates(element, aligned: bool, threads: int = THREADS, listed: int = LISTED) -> Kernel:
    load, count = loader(element, aligned, EACH), EACH
    thin = thinner(count, listed)

    @kernel(
        threads=threads,
        name=f"draft_candidates_{element}{'' if aligned else '_odd'}",
        registers=112,
        opcodes=("REDUX", "BAR.RED"),
        pdl=True,
    )
    @cuda.jit
    def draft_candidates_kernel(
        logits: read(element),
        width: int32,
        first_id: int32,
        k: int32,
        tops: update(int64),
        state: update(int64),
        lists: update(int64),
        capacity: int64,
    ):
        row, block, thread = cuda.blockIdx.y, cuda.blockIdx.x, cuda.threadIdx.x
        values = cuda.local.array(count, float32)
        keys = cuda.local.array(count, int64)
        kept = cuda.shared.array(listed, int64)
        place = cuda.shared.array(1, int64)
        ptx.launch_next()
        ptx.wait_for_previous()
        load(logits, row, block, width, values)
        own = int64(0)
        for i in range(count):
            column = column_of(block, i, EACH)
            keys[i] = int64(0)
            if column < width:
                order = int64(0)  # NaN comes last
                if values[i] == values[i]:
                    order = ordered(values[i])
                keys[i] = key_of(order, first_id + column)
            own = max(own, keys[i])
        top = ptx.redux_max(own >> ID_BITS)
        if thread & 31 == 0:
            ptx.red_max_u64(tops, row, int64(top) << ID_BITS)
        found = thin(keys, k, kept)
        if thread == 0:
            place[0] = int64(ptx.atom_add_u64(state, row * STATE + COUNT, found))
        cuda.syncthreads()
        i = thread
        while i < found:
            lists[row * capacity + place[0] + i] = kept[i]
            i += threads

    return draft_candidates_kernel


@cuda.jit(device=True, inline="always")
def log_prob(key, top, total):
    """Log-probability of a key's logit; NaN where the row has no distribution."""
    result, greatest = NAN, float_of(top >> ID_BITS)
    if usable(top) and key >> ID_BITS > 0:
        result = (float_of(key >> ID_BITS) - greatest) - log32(float32(total) * MASS_WEIGHT)
    return result


@cache
def make_finish(
    element, aligned: bool, sharded: bool, threads: int = THREADS, listed: int = LISTED
) -> Kernel:
    load, each = loader(element, aligned, EACH), EACH
    carried = -(
        -listed // threads
    )  # keys that a thread carries from one part of a list to the next
    count = each + carried
    thin = thinner(count, listed)
    suffix = ("_shard" if sharded else "") + ("" if aligned else "_odd")

    @kernel(
        threads=threads,
        name=f"draft_finish_{element}{suffix}",
        registers=112,
        opcodes=("REDUX", "BAR.RED"),
        pdl=True,
    )
    @cuda.jit
    def draft_finish_kernel(
        logits: read(element),
        width: int32,
        k: int32,
        tops: read(int64),
        shards: int32,
        own_tops: update(int64),
        state: update(int64),
        lists: read(int64),
        capacity: int64,
        best: update(int64),
        totals: write(int64),
        token_ids: write(int32),
        log_probs: write(float32),
    ):
        row, thread = cuda.blockIdx.y, cuda.threadIdx.x
        base = row * STATE
        kept = cuda.shared.array(listed, int64)
        ptx.launch_next()
        ptx.wait_for_previous()
        top = int64(0)
        i = 0
        while i < shards:
            top = max(top, tops[i * cuda.gridDim.y + row])
            i += 1
        if cuda.blockIdx.x == 0:
            keys = cuda.local.array(count, int64)
            listed_keys, found, first = state[base + COUNT], 0, 0
            while first < listed_keys:
                for n in range(each):
                    i = first + n * threads + thread
                    keys[n] = int64(0)
                    if i < listed_keys:
                        keys[n] = lists[row * capacity + i]
                for n in range(carried):
                    i = n * threads + thread
                    keys[each + n] = int64(0)
                    if i < found:
                        keys[each + n] = kept[i]
                cuda.syncthreads()  # before kept is written again
                found = thin(keys, k, kept)
                first += each * threads
            i = thread
            while i < found:
                key, rank, other = kept[i], 0, 0
                while other < found:
                    rank += kept[other] > key
                    other += 1
                if rank < k:
                    best[row * k + rank] = key
                i += threads
            if thread < k and thread >= found:
                best[row * k + thread] = int64(0)  # a shard of fewer tokens
        elif usable(top):
            values = cuda.local.array(each, float32)
            load(logits, row, cuda.blockIdx.x - 1, width, values)
            greatest, total = float_of(top >> ID_BITS), int64(0)
            for i in range(each):
                if column_of(cuda.blockIdx.x - 1, i, EACH) < width:
                    total += mass(values[i] - greatest)
            step = 16
            while step > 0:
                total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
                step >>= 1
            if thread & 31 == 0:
                ptx.red_add_u64(state, base + TOTAL, total)
        if arrive(state, base + ARRIVED):
            total = state[base + TOTAL]
            if sharded:
                if thread == 0:
                    totals[row] = total
            elif thread < k:
                key = best[row * k + thread]
                token_ids[row * k + thread] = int32(id_of(key))
                log_probs[row * k + thread] = log_prob(key, top, total)
            cuda.syncthreads()
            if thread == 0:
                state[base + TOTAL] = 0
                state[base + COUNT] = 0
                own_tops[row] = 0

    return draft_finish_kernel


@cache
def make_merge(threads: int = THREADS) -> Kernel:
    @kernel(threads=threads, name="draft_merge", registers=112, pdl=True)
    @cuda.jit
    def draft_merge_kernel(
        keys: read(int64),
        totals: read(int64),
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
            shared[i] = keys[(i // k * rows + row) * k + i % k]
            i += threads
        i = 0
        while i < shards:
            top = max(top, tops[i * rows + row])
            total += totals[i * rows + row]
            i += 1
        cuda.syncthreads()
        i = thread
        while i < shards * k:
            key, rank, other = shared[i], 0, 0
            while other < shards * k:
                rank += shared[other] > key
                other += 1
            if rank < k and key > 0:
                token_ids[row * k + rank] = int32(id_of(key))
                log_probs[row * k + rank] = log_prob(key, top, total)
            i += threads

    return draft_merge_kernel
