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

Partials read the plan ahead of their wait for the kernel before: it must be older than that one,
which `plan_ends` behind it sees to.
"""

from functools import cache

from numba import cuda, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, update
from ddtree_numba.kernels.attention_splits import BEFORE1, BEFORE2, CHUNK, split_of, split_start
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.numerics import divided

THREADS = CANDIDATES = 128
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


@cache
def make(units: int, parts: int) -> Kernel:
    """units: of a shared piece; 0: none is shared. parts: units of a node, one for 8 heads."""
    group = max(units, 1)

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
        lasts: update(int32),
        items: update(int32),
        ranges: update(int32),
    ):
        needed = cuda.shared.array(CANDIDATES, int32)
        tid = int32(cuda.threadIdx.x)
        least = int32(0)
        i = tid
        while i < requests * nodes:
            r, node = divided(i, nodes)
            last = int32(-1)
            if node < sizes[r]:
                last = int32(starts[r] - 1)
                d = int32(0)
                while d < depths:
                    if paths[i * depths + d] >= 0:
                        last = int32(last + 1)
                    d = int32(d + 1)
            lasts[i] = last
            i += THREADS
        cuda.syncthreads()

        total, longest, capacity = int32(0), int32(1), int32(0)
        pass_ = 0  # 0: pieces and their time; 1: every thread tries a capacity; 2: ranges
        while pass_ < 3:
            at, block, load = int32(0), int32(0), int32(0)
            r = int32(0)
            while r < requests:
                size, start = int32(sizes[r] * parts), int32(starts[r])
                full = int32(split_of(start))
                groups = int32((size + group - 1) // group)
                each, _ = divided(size + max(groups, 1) - 1, max(groups, 1))
                # runs of pieces of one length: three of shared ones, then what each unit has left
                run = int32(0)
                while run < 3 + size:
                    tail = 1 if run >= 3 else 0
                    unit = run - 3
                    split = BEFORE2 if run == 0 else BEFORE1 if run == 1 else 0
                    behind = full if run == 0 else min(full, BEFORE2 if run == 1 else BEFORE1)
                    last = start - 1
                    if tail:
                        node, _ = divided(unit, parts)
                        last = lasts[r * nodes + node]
                        split, behind = full, split_of(last) + 1
                    many = max(behind - split, 0)
                    count = many if tail else groups * many
                    first = split_start(split)
                    end = split_start(split + 1)
                    if tail:
                        end = min(end, last + 1)
                    time = int32(PIECE + (end - first + CHUNK - 1 >> CHUNK_SHIFT))
                    if pass_ == 0:
                        total = int32(total + count * time)
                        if count > 0:
                            longest = max(longest, time)
                        j = tid
                        while j < count:
                            which, own = divided(j, many)
                            own = split + own
                            begin = split_start(own)
                            stop = min(split_start(own + 1), last + 1)
                            e = (at + j) * ITEM
                            items[e] = r
                            items[e + 1] = unit if tail else which * each
                            items[e + 2] = 1 if tail else min(each, size - which * each)
                            items[e + 3] = begin
                            items[e + 4] = stop - begin + CHUNK - 1 >> CHUNK_SHIFT
                            items[e + 5] = last
                            items[e + 6] = own
                            items[e + 7] = start
                            j += THREADS
                    elif count > 0:
                        fit, _ = divided(capacity - load, time)
                        fit = min(fit, int32(count))
                        load = int32(load + fit * time)
                        rest = int32(count - fit)
                        if rest > 0:
                            a_block, _ = divided(capacity, time)
                            more, _ = divided(rest + a_block - 1, a_block)
                            if pass_ == 2 and tid == 0:
                                n = 0
                                while n < more:
                                    ranges[block + 1 + n] = at + fit + n * a_block
                                    n += 1
                            block = int32(block + more)
                            load = int32((rest - (more - 1) * a_block) * time)
                    at = int32(at + count)
                    run = int32(run + 1)
                r = int32(r + 1)
            if pass_ == 0:
                mean, _ = divided(total + blocks - 1, blocks)
                least = max(mean, longest)
                capacity = candidate(least, tid)
            elif pass_ == 1:
                needed[tid] = block + 1
                cuda.syncthreads()
                best = int32(0)
                while needed[best] > blocks:
                    best = int32(best + 1)
                capacity = candidate(least, best)
            elif tid == 0:
                ranges[0] = 0
                while block < blocks:
                    ranges[block + 1] = at
                    block += 1
            pass_ += 1

    return plan_kernel


@kernel(threads=32, name="attention_plan_ends", pdl=True)
@cuda.jit
def plan_ends(ranges: read(int32)):
    """The plan is complete and seen by all when this lets the next kernel start."""
    ptx.wait_for_previous()
    ptx.launch_next()
