"""The second pass of `draft_topk.py`: masses, the tokens that reach the bound, their order."""

from functools import cache

from numba import cuda, float32, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.kernels.draft_passes import (
    ARRIVED,
    FIRST,
    OVERFLOW,
    STATE,
    THREADS,
    TOTAL,
    log_prob,
    log_sum_of,
)
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.numerics import (
    ID_BITS,
    NAN,
    float_of,
    id_of,
    key_of,
    mass,
    ordered,
)
from ddtree_numba.kernels.selection import usable
from ddtree_numba.kernels.thinning import bound_of, thinner
from ddtree_numba.kernels.vocabulary import arrive, column_of, loader

SLOTS = 16  # keys that a block may list; for k = 64, a row of 40 blocks lists about 80
KEPT = 256  # keys of a row that its last block orders
UNROLL = 4


@cache
def make_finish(
    element,
    aligned: bool,
    each: int,
    sharded: bool,
    threads: int = THREADS,
    slots: int = SLOTS,
    kept_keys: int = KEPT,
) -> Kernel:
    load = loader(element, aligned, each)
    carried = -(-kept_keys // threads)
    count = each + carried
    warps = threads // 32
    thin = thinner(count, kept_keys)
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
        record: write(int64),
        token_ids: write(int32),
        log_probs: write(float32),
    ):
        row, block, thread = cuda.blockIdx.y, cuda.blockIdx.x, cuda.threadIdx.x
        base, groups = row * STATE, cuda.gridDim.x * warps
        values = cuda.local.array(each, float32)
        bounds = cuda.shared.array(1, int64)
        kept = cuda.shared.array(kept_keys, int64)
        places = cuda.shared.array(1, int32)
        for i in range(each):
            values[i] = NAN
        ptx.launch_next()
        ptx.wait_for_previous()
        load(logits, row, block, width, values)
        own_list = (row * cuda.gridDim.x + block) * slots
        if thread < slots:
            lists[own_list + thread] = 0
        if thread == 0:
            places[0] = 0
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
        bound, least = bounds[0], float_of(bounds[0])
        for i in range(each):
            column = column_of(block, i, each)
            if values[i] >= least or (bound == 0 and column < width):
                place = cuda.atomic.add(places, 0, 1)
                if place < slots:
                    lists[own_list + place] = key_at(values[i], column, first_id)
                else:
                    state[base + OVERFLOW] = 1
        if arrive(state, base + ARRIVED):
            keys = cuda.local.array(count, int64)
            some = cuda.local.array(UNROLL, int64)
            overflow, total = state[base + OVERFLOW], state[base + TOTAL]
            listed = int32(cuda.gridDim.x * slots)
            i = int32(thread)
            while i < kept_keys:
                kept[i] = 0
                i = int32(i + threads)
            if thread == 0:
                places[0] = 0
            log_sum = log_sum_of(total)
            cuda.syncthreads()
            first = int32(thread)
            while first < listed:
                for n in range(UNROLL):
                    some[n] = int64(0)
                    if first + n * threads < listed:
                        some[n] = lists[row * listed + first + n * threads]
                for n in range(UNROLL):
                    if some[n] > 0:
                        place = cuda.atomic.add(places, 0, 1)
                        if place < kept_keys:
                            kept[place] = some[n]
                first = int32(first + UNROLL * threads)
            cuda.syncthreads()
            found = int64(places[0])
            if overflow > 0 or found > kept_keys:
                # great logits side by side, or equal: part by part through the whole row
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
                    key, rank, other = kept[i], int32(0), int32(0)
                    while other < found:
                        for m in range(UNROLL):
                            if kept[other + m] > key and other + m < found:
                                rank = int32(rank + 1)
                        other = int32(other + UNROLL)
                    if rank < k:
                        if sharded:
                            record[row * (k + 1) + rank] = key
                        else:
                            token_ids[row * k + rank] = int32(id_of(key))
                            log_probs[row * k + rank] = log_prob(key, top, log_sum)
            if sharded:
                i = found + thread
                while i < k:  # a shard of fewer tokens
                    record[row * (k + 1) + i] = 0
                    i += threads
            if thread == 0:
                if sharded:
                    record[row * (k + 1) + k] = total
                state[base + TOTAL] = 0
                state[base + OVERFLOW] = 0
                state[base + FIRST] = 0
                own_tops[row] = 0

    return draft_finish_kernel
