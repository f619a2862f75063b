"""The passes of `draft_topk.py` over rows of draft logits: maxima, finish, merge of shards."""

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
from ddtree_numba.kernels.thinning import bound_of, thinner
from ddtree_numba.kernels.vocabulary import MOST_WARPS, arrive, column_of, loader

THREADS = 256
MOST = 64  # k
LISTED = 256  # keys of a row's list: 71 are expected for k = 64
MOST_MERGED = 1024  # keys of all shards of a row

# The state of a row: int64 words, all zero between calls
STATE = 4
TOTAL, COUNT, ARRIVED, FIRST = range(STATE)


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
def log_prob(key, top, total):
    """Log-probability of a key's logit; NaN where the row has no distribution."""
    result, greatest = NAN, float_of(top >> ID_BITS)
    if usable(top) and key >> ID_BITS > 0:
        result = (float_of(key >> ID_BITS) - greatest) - log32(float32(total) * MASS_WEIGHT)
    return result


@cache
def make_finish(
    element,
    aligned: bool,
    each: int,
    sharded: bool,
    threads: int = THREADS,
    listed: int = LISTED,
) -> Kernel:
    load = loader(element, aligned, each)
    carried = -(-listed // threads)  # keys of a thread in the list
    count = each + carried
    warps = threads // 32
    thin = thinner(count, listed)
    suffix = ("_shard" if sharded else "") + ("" if aligned else "_odd")

    @cuda.jit(device=True, inline="always")
    def key_at(value, column, first_id):
        order = int64(0)
        if value == value:
            order = ordered(value)
        return key_of(order, first_id + column)

    @kernel(
        threads=threads,
        name=f"draft_finish_{element}_{each}{suffix}",
        min_blocks=3,
        registers=80,
        opcodes=("REDUX",),
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
        maxima: read(int64),
        lists: update(int64),
        keys_out: write(int64),
        totals: write(int64),
        token_ids: write(int32),
        log_probs: write(float32),
    ):
        row, block, thread = cuda.blockIdx.y, cuda.blockIdx.x, cuda.threadIdx.x
        base, groups = row * STATE, cuda.gridDim.x * warps
        values = cuda.local.array(each, float32)
        bounds = cuda.shared.array(1, int64)
        kept = cuda.shared.array(listed, int64)
        for i in range(each):
            values[i] = NAN
        ptx.launch_next()
        ptx.wait_for_previous()
        load(logits, row, block, width, values)
        first_id = int32(state[base + FIRST])
        top = tops[row]
        if sharded:
            i = 1
            while i < shards:
                top = max(top, tops[i * cuda.gridDim.y + row])
                i += 1
        if thread < 32:
            bound = bound_of(maxima, row * groups, groups, k)
            if thread == 0:
                bounds[0] = bound
        if usable(top):
            greatest, total = float_of(top >> ID_BITS), int64(0)
            for i in range(each):
                total += mass(values[i] - greatest)  # of NaN: 0
            step = 16
            while step > 0:
                total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
                step >>= 1
            if thread & 31 == 0:
                ptx.red_add_u64(state, base + TOTAL, total)
        cuda.syncthreads()
        bound, least, hits = bounds[0], float_of(bounds[0]), int32(0)
        for i in range(each):
            if values[i] >= least or (bound == 0 and column_of(block, i, each) < width):
                hits = int32(hits + 1)
        if hits > 0:
            place = int64(ptx.atom_add_u64(state, base + COUNT, hits))
            for i in range(each):
                column = column_of(block, i, each)
                if values[i] >= least or (bound == 0 and column < width):
                    if place < listed:
                        lists[row * listed + place] = key_at(values[i], column, first_id)
                    place += 1
        if arrive(state, base + ARRIVED):
            keys = cuda.local.array(count, int64)
            for n in range(carried):
                keys[n] = lists[row * listed + n * threads + thread]
            found, total = state[base + COUNT], state[base + TOTAL]
            if found <= listed:
                for n in range(carried):
                    kept[n * threads + thread] = keys[n]
            else:  # great logits side by side, or equal: part by part through the whole row
                found, part = int64(0), 0
                while part < cuda.gridDim.x:
                    for i in range(each):
                        values[i] = NAN
                    load(logits, row, part, width, values)
                    for i in range(each):
                        column = column_of(part, i, each)
                        keys[i] = int64(0)
                        if column < width:
                            keys[i] = key_at(values[i], column, first_id)
                    for n in range(carried):
                        i = n * threads + thread
                        keys[each + n] = int64(0)
                        if i < found:
                            keys[each + n] = kept[i]
                    cuda.syncthreads()  # before kept is written again
                    found = int64(thin(keys, k, kept))
                    part += 1
            cuda.syncthreads()
            for n in range(carried):
                i = n * threads + thread
                if i < found:
                    key, rank, other = kept[i], 0, 0
                    while other < found:
                        rank += kept[other] > key
                        other += 1
                    if rank < k:
                        if sharded:
                            keys_out[row * k + rank] = key
                        else:
                            token_ids[row * k + rank] = int32(id_of(key))
                            log_probs[row * k + rank] = log_prob(key, top, total)
            if sharded:
                i = found + thread
                while i < k:  # a shard of fewer tokens
                    keys_out[row * k + i] = 0
                    i += threads
            if thread == 0:
                if sharded:
                    totals[row] = total
                state[base + TOTAL] = 0
                state[base + COUNT] = 0
                state[base + FIRST] = 0
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
