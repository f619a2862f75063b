"""Top-k and top-p without sorting: the lowest key that stays, found by integer weights.

Tokens of a row are ranked by their keys. A token weighs 1 (top-k) or its mass (top-p); the tokens
that stay are the first ranks until their weight reaches what is needed. Each launch divides the
interval that holds the last of them into 2,048 bins by distance from the greatest key, and adds up
weights: exact, so the blocks' order does not matter. The first launch looks at two octaves below
the greatest logit and puts all beyond into its last bin. Six launches get to a single key, four of
them as a rule; where nothing is left to do, blocks return at once. Other numbers of threads and of
bins take other numbers of launches to the same key.
"""

import math
from functools import cache

from numba import cuda, float32, float64, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, update
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.numerics import (
    ID_BITS,
    ORDER_INFINITY,
    ORDER_NEGATIVE_INFINITY,
    float_of,
    key_of,
    mass,
    ordered,
)
from ddtree_numba.kernels.vocabulary import MOST_WARPS, THREADS, arrive, column_of, loader
from ddtree_numba.spec.next_token import LARGEST

# The state of a row: int64 words, all zero between calls
STATE = 8
TOP, WINNER, ARRIVED, FLOOR, START, NEEDED, SHIFT = range(7)

EACH = 8  # tokens of a thread
KEY_BITS = 52
LEVEL_BITS = 11  # 2,048 bins
FIRST_SPAN = 44  # two octaves: [8, 16) is 2**43 keys wide
DONE = -1
LOW_BITS = 20  # a mass is added up in two halves: 2,048 of either stay below 2**32
LOW_MASK = (1 << LOW_BITS) - 1


def levels(bits: int) -> int:
    """Launches that always suffice: the first, then all bits of the keys beyond its span."""
    return 1 + -(-KEY_BITS // bits)


@cuda.jit(device=True, inline="always")
def usable(top):
    """Whether the greatest key belongs to a finite logit; a NaN counts as the greatest."""
    order = top >> ID_BITS
    return order > ORDER_NEGATIVE_INFINITY and order < ORDER_INFINITY


@cuda.jit(device=True, inline="always")
def scale(logit, temperature):
    """logit / temperature; a finite logit stays finite, -inf stays what it is."""
    scaled = logit
    if logit >= -LARGEST:
        scaled = ptx.fmin(ptx.fmax(logit / temperature, -LARGEST), LARGEST)
    return scaled


@cuda.jit(device=True, inline="always")
def warp_prefix(value):
    """The sum over this lane and those below."""
    lane = cuda.threadIdx.x & 31
    step = 1
    while step < 32:
        other = cuda.shfl_up_sync(0xFFFFFFFF, value, step)
        if lane >= step:
            value += other
        step <<= 1
    return value


@cache
def make(
    element, aligned: bool, weighted: bool, threads: int = THREADS, bits: int = LEVEL_BITS
) -> Kernel:
    load = loader(element, aligned, EACH)
    suffix = ("" if aligned else "_odd") + ("_mass" if weighted else "_count")
    bins, each, warps = 1 << bits, (1 << bits) // threads, threads // 32
    first_shift, rest_shift, rest = FIRST_SPAN - bits, KEY_BITS - bits, bins - 1

    @kernel(
        threads=threads,
        name=f"select_{element}{suffix}",
        registers=64,
        opcodes=("ATOMS.ADD",),
        pdl=True,
        float64=weighted,
    )
    @cuda.jit
    def select_kernel(
        logits: read(element),
        width: int32,
        rows: int32,
        level: int32,
        temperatures: read(float32),
        top_ks: read(int32),
        shares: read(float64),
        state: update(int64),
    ):
        row, thread = cuda.blockIdx.y, cuda.threadIdx.x
        base, table = row * STATE, rows * STATE + row * bins
        values = cuda.local.array(EACH, float32)
        low = cuda.shared.array(bins, uint32)
        high = cuda.shared.array(bins, uint32)
        sums = cuda.shared.array(MOST_WARPS, int64)
        ptx.launch_next()
        ptx.wait_for_previous()
        top, floor = state[base + TOP], state[base + FLOOR]
        temperature, start, shift = temperatures[row], int64(0), int64(first_shift)
        if level > 0:
            start, shift = state[base + START], state[base + SHIFT]
        filters = top_ks[row] > 0 and top_ks[row] < width
        if weighted:
            filters = shares[row] < 1.0
        if filters and temperature > float32(0) and shift != DONE and usable(top):
            load(logits, row, cuda.blockIdx.x, width, values)
            b = thread
            while b < bins:
                low[b] = 0
                if weighted:
                    high[b] = 0
                b += threads
            cuda.syncthreads()
            greatest = float32(0)
            if weighted:
                greatest = scale(float_of(top >> ID_BITS), temperature)
            rest_low, rest_high = uint32(0), uint32(0)
            for k in range(EACH):
                column = column_of(cuda.blockIdx.x, k, EACH)
                if column < width:
                    key = key_of(ordered(values[k]), column)
                    distance = top - key - start
                    bin = distance >> shift
                    if distance >= 0 and key >= floor and (bin < bins or level == 0):
                        weight = int64(1)
                        if weighted:
                            weight = mass(scale(values[k], temperature) - greatest)
                        part_low, part_high = uint32(weight & LOW_MASK), uint32(weight >> LOW_BITS)
                        if level == 0 and bin >= rest:  # half of all tokens: not one by one
                            rest_low = uint32(rest_low + part_low)
                            rest_high = uint32(rest_high + part_high)
                        else:
                            cuda.atomic.add(low, int32(bin), part_low)
                            if weighted:
                                cuda.atomic.add(high, int32(bin), part_high)
            if level == 0:
                rest_low = ptx.redux_add(rest_low)
                rest_high = ptx.redux_add(rest_high)
                if thread & 31 == 0:
                    cuda.atomic.add(low, rest, rest_low)
                    if weighted:
                        cuda.atomic.add(high, rest, rest_high)
            cuda.syncthreads()
            b = thread
            while b < bins:
                weight = int64(low[b])
                if weighted:
                    weight += int64(high[b]) << LOW_BITS
                if weight > 0:
                    ptx.red_add_u64(state, table + b, weight)
                b += threads
            if arrive(state, base + ARRIVED):
                own = int64(0)
                for i in range(each):
                    own += state[table + thread * each + i]
                through = warp_prefix(own)
                if thread & 31 == 31:
                    sums[thread >> 5] = through
                cuda.syncthreads()
                total = int64(0)
                for w in range(warps):
                    if w == thread >> 5:
                        through += total
                    total += sums[w]
                needed = state[base + NEEDED]
                if level == 0:
                    needed = int64(top_ks[row])
                    if weighted:
                        needed = int64(math.ceil(float64(total) * shares[row]))
                cuda.syncthreads()  # all have read the state that one of them changes
                before = through - own
                for i in range(each):
                    b = thread * each + i
                    weight = state[table + b]
                    state[table + b] = 0
                    if before < needed and needed <= before + weight:
                        start += int64(b) << shift
                        state[base + START] = start
                        state[base + NEEDED] = needed - before
                        if shift == 0:
                            state[base + FLOOR] = top - start
                            state[base + SHIFT] = DONE
                        elif level == 0 and b == rest:
                            state[base + SHIFT] = rest_shift
                        else:
                            state[base + SHIFT] = max(shift - bits, 0)
                    before += weight

    return select_kernel
