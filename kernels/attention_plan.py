"""Who does what in tree attention: once a step, for all its layers.

A unit is a node with eight of its heads: the eight columns of an mma. A piece of work is

    shared    one split whose positions are all committed, for up to `units` units of a request
    tail      one split that a node's own path reaches into, for one unit

`lasts` [R, N] is the last position that a node sees, -1 for padding. `items` holds eight integers a
piece: request, first unit, number of units, first position, chunks, last position that is seen,
split, committed positions of the request. Pieces of a request lie in one order, long splits first,
tails last, and block b does items[ranges[b] : ranges[b + 1]]: a block is filled until the next
piece would take it over a capacity, the least of CANDIDATES that needs no more blocks than there
are. Only the schedule depends on that, on estimated times; the bits of a result do not.

Partials read the plan ahead of their wait: `plan_ends`, between them, waits for it before it lets
them start.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.kernels.attention_splits import BEFORE1, BEFORE2, CHUNK, split_of, split_start
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.numerics import divided

THREADS = CANDIDATES = 128
WARPS, ROOM = THREADS // 32, THREADS + 1
SHARED = 3  # runs of pieces that units share, of a request; then a run for each tail
FEW = 2  # pieces of a run that are counted one by one
LOADS = 8  # under way together
FINENESS_SHIFT = 6  # log2 of the candidates from the mean load, or the longest piece, to its double
FINENESS = 1 << FINENESS_SHIFT
CHUNK_SHIFT = CHUNK.bit_length() - 1
ITEM = 8  # integers
PIECE = 1  # estimated time of a piece as such, in chunks


@cuda.jit(device=True, inline="always")
def candidate(least, i):
    """The capacity number i: least * (1 + i / FINENESS), where least * i may exceed 32 bits."""
    whole, rest = least >> FINENESS_SHIFT, least & (FINENESS - 1)
    return int32(least + whole * i + (rest * i >> FINENESS_SHIFT))


class Run(NamedTuple):
    """Pieces of one time that follow each other in the plan."""

    split: int  # the first
    many: int  # splits
    groups: int  # of units, each of which has all the splits
    time: int
    last: int


@cache
def make(units: int, parts: int) -> Kernel:
    """units: of a shared piece; 0: none is shared. parts: units of a node, one for 8 heads."""
    group = max(units, 1)

    @cuda.jit(device=True, inline="always")
    def run_of(split, behind, groups, last, tail):
        """Of `groups` the splits from `split` to `behind` - 1; a tail's last one is cut."""
        many = int32(max(behind - split, 0))
        end = split_start(split + 1)
        if tail:
            end = min(end, last + 1)
        time = int32(PIECE + (end - split_start(split) + CHUNK - 1 >> CHUNK_SHIFT))
        return Run(int32(split), many, int32(groups), time, int32(last))

    @cuda.jit(device=True, inline="always")
    def shared_run(start, size, run):
        """Number 0, 1, 2 of a request with `size` units: long splits, middle ones, short ones."""
        full = int32(split_of(start))
        split, behind = int32(0), min(full, int32(BEFORE1))
        if run == 0:
            split, behind = int32(BEFORE2), full
        elif run == 1:
            split, behind = int32(BEFORE1), min(full, int32(BEFORE2))
        return run_of(split, behind, (size + group - 1) // group, int32(start - 1), False)

    @cuda.jit(device=True, inline="always")
    def put_items(items, at, run, r, unit, each, size, start, tail, first, step):
        """The run's pieces number first, first + step, ..."""
        count = run.groups * run.many
        j = first
        while j < count:
            which, own = divided(j, run.many)
            own = run.split + own
            begin = split_start(own)
            stop = min(split_start(own + 1), run.last + 1)
            e = (at + j) * ITEM
            items[e] = r
            items[e + 1] = unit if tail else which * each
            items[e + 2] = 1 if tail else min(each, size - which * each)
            items[e + 3] = begin
            items[e + 4] = stop - begin + CHUNK - 1 >> CHUNK_SHIFT
            items[e + 5] = run.last
            items[e + 6] = own
            items[e + 7] = start
            j = int32(j + step)

    @kernel(threads=THREADS, name=f"attention_plan_{units}_{parts}", registers=128)
    @cuda.jit
    def plan_kernel(
        starts: read(int32),
        paths: read(int32),
        sizes: read(int32),
        requests: int32,
        nodes: int32,
        depths: int32,
        blocks: int32,
        lasts: write(int32),
        items: update(int32),
        ranges: update(int32),
    ):
        counts = cuda.shared.array(ROOM, int32)  # of the runs in the window
        times = cuda.shared.array(ROOM, int32)
        places = cuda.shared.array(THREADS, int32)
        least_of = cuda.shared.array(WARPS, int32)
        tid = int32(cuda.threadIdx.x)
        stride = int32(SHARED + nodes * parts)  # runs of a request, empty ones among them
        runs = int32(requests * stride)
        total, longest, capacity, least = int32(0), int32(1), int32(0), int32(0)
        pass_ = 0  # 0: pieces and their time; 1: every thread tries a capacity; 2: ranges
        while pass_ < 3:
            at, block, load = int32(0), int32(0), int32(0)
            base = int32(0)
            while base < runs:
                inside = min(int32(runs - base), int32(THREADS))
                r, number = divided(min(int32(base + tid), int32(runs - 1)), stride)
                start, size = int32(starts[r]), int32(sizes[r] * parts)
                groups = int32((size + group - 1) // group)
                each, _ = divided(size + max(groups, 1) - 1, max(groups, 1))
                unit = int32(number - SHARED)
                tail = unit >= 0
                if pass_ == 0 or runs > THREADS:
                    run = shared_run(start, size, number)
                    if tail:
                        node, part = divided(unit, parts)
                        row = r * nodes + node
                        last = int32(start - 1)
                        d = int32(0)
                        while d < depths:
                            for e in range(LOADS):
                                seen = paths[row * depths + min(int32(d + e), int32(depths - 1))]
                                if seen >= 0 and d + e < depths:
                                    last = int32(last + 1)
                            d = int32(d + LOADS)
                        if unit >= size:
                            last = int32(-1)
                        if part == 0 and pass_ == 0 and tid < inside:
                            lasts[row] = last
                        full = int32(split_of(start))
                        run = run_of(full, split_of(last) + 1 if last >= 0 else 0, 1, last, True)
                    cuda.syncthreads()
                    counts[tid] = run.groups * run.many
                    times[tid] = run.time
                    if tid == 0:
                        counts[THREADS], times[THREADS] = 0, 1
                    cuda.syncthreads()
                count, time = counts[0], times[0]
                k = int32(0)
                while k < inside:
                    next_count, next_time = counts[k + 1], times[k + 1]
                    if pass_ == 0:
                        if k == tid:
                            places[tid] = at
                        total = int32(total + count * time)
                        if count > 0:
                            longest = max(longest, time)
                    elif count > FEW:
                        fit, _ = divided(capacity - load, time)
                        fit = min(fit, count)
                        load = int32(load + fit * time)
                        rest = int32(count - fit)
                        if rest > 0:
                            a_block, _ = divided(capacity, time)
                            more, _ = divided(rest + a_block - 1, a_block)
                            if pass_ == 2:
                                n = tid
                                while n < more:
                                    ranges[block + 1 + n] = at + fit + n * a_block
                                    n = int32(n + THREADS)
                            block = int32(block + more)
                            load = int32((rest - (more - 1) * a_block) * time)
                    else:
                        n = int32(0)
                        while n < count:
                            load = int32(load + time)
                            if load > capacity:
                                block, load = int32(block + 1), time
                                if pass_ == 2 and tid == 0:
                                    ranges[block] = at + n
                            n = int32(n + 1)
                    at = int32(at + count)
                    count, time = next_count, next_time
                    k = int32(k + 1)
                if pass_ == 0:
                    if tail and tid < inside:
                        put_items(
                            items, places[tid], run, r, unit, each, size, start, True, int32(0), 1
                        )
                    cuda.syncthreads()
                    k = int32(0)
                    while k < inside:
                        r, number = divided(int32(base + k), stride)
                        if number < SHARED:
                            start, size = int32(starts[r]), int32(sizes[r] * parts)
                            groups = int32((size + group - 1) // group)
                            each, _ = divided(size + max(groups, 1) - 1, max(groups, 1))
                            run = shared_run(start, size, number)
                            put_items(
                                items, places[k], run, r, 0, each, size, start, False, tid, THREADS
                            )
                            k = int32(k + 1)
                        else:
                            k = int32(k + stride - number)
                base = int32(base + THREADS)
            if pass_ == 0:
                mean, _ = divided(total + blocks - 1, blocks)
                least = max(mean, longest)
                capacity = candidate(least, tid)
            elif pass_ == 1:
                best = int32(ptx.redux_min(tid if block < blocks else CANDIDATES - 1))
                if tid & 31 == 0:
                    least_of[tid >> 5] = best
                cuda.syncthreads()
                for w in range(WARPS):
                    best = min(best, least_of[w])
                capacity = candidate(least, best)
            else:
                n = int32(block + tid)
                while n < blocks:
                    ranges[n + 1] = at
                    n = int32(n + THREADS)
                if tid == 0:
                    ranges[0] = 0
            pass_ += 1

    return plan_kernel


@kernel(threads=32, name="attention_plan_ends", pdl=True)
@cuda.jit
def plan_ends(ranges: read(int32)):
    """The plan is complete and seen by all when this lets the next kernel start."""
    ptx.wait_for_previous()
    ptx.launch_next()
