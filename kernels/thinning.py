"""The greatest k of many keys, and a few more, without sorting them: bounds found by halving.

The k-th greatest of the maxima of groups is a bound that at least k keys reach, and few more as a
rule. `thinner`: the keys of a block, a thread being a group and a barrier that counts a step. Where
too many keys reach the bound, because a few threads hold all great ones, the exact k-th key is
found in the same way, with all keys counted. `bound_of`: one warp, from maxima that are given.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.numerics import ID_BITS, ORDER_NEGATIVE_INFINITY
from ddtree_numba.kernels.vocabulary import MOST_WARPS

GROUPS = 8  # of a lane of `bound_of`: 256 in all, for k <= 64
SLACK = 8  # it may let pass k / 8 groups more


@cache
def thinner(count: int, most: int):
    """thin(keys, k, kept): the number of keys in kept, which are the greatest k and perhaps more.

    keys: `count` of every thread, 0 for none. kept: a shared array of `most` >= k int64, which may
    be read at once. All threads call, with the same k, and meet before they call again.
    """

    @cuda.jit(device=True, inline="always")
    def collect(keys, bound, kept, places):
        for i in range(count):
            if keys[i] >= bound:
                place = cuda.atomic.add(places, 0, 1)
                if place < most:
                    kept[place] = keys[i]
        cuda.syncthreads()
        return places[0]

    @cuda.jit(device=True, inline="always")
    def thin(keys, k, kept):
        tops = cuda.shared.array(MOST_WARPS, int64)
        lows = cuda.shared.array(MOST_WARPS, int64)
        places = cuda.shared.array(1, int32)
        thread = cuda.threadIdx.x
        own = keys[0]
        for i in range(1, count):
            own = max(own, keys[i])
        top, low = ptx.redux_max(own >> ID_BITS), ptx.redux_min(own >> ID_BITS)
        if thread & 31 == 0:
            tops[thread >> 5], lows[thread >> 5] = int64(top), int64(low)
        if thread == 0:
            places[0] = 0
        holders = cuda.syncthreads_count(int32(own > 0))
        high, least = tops[0], lows[0]
        w = 1
        while w < cuda.blockDim.x >> 5:
            high, least = max(high, tops[w]), min(least, lows[w])
            w += 1
        above, bound = (high + 1) << ID_BITS, int64(1)  # above: reached by fewer than k
        if holders >= k:
            bound = least << ID_BITS
            while above - bound > 1:
                middle = (bound + above) >> 1
                reached = cuda.syncthreads_count(int32(own >= middle))
                if reached >= k:
                    bound = middle
                else:
                    above = middle
                if reached == k:
                    above = bound
        bound = max(bound, int64(1))
        reached = collect(keys, bound, kept, places)
        if reached > most:
            above = (high + 1) << ID_BITS
            while above - bound > 1:
                middle, reached = (bound + above) >> 1, 0
                for i in range(count):
                    reached += cuda.syncthreads_count(int32(keys[i] >= middle))
                if reached >= k:
                    bound = middle
                else:
                    above = middle
                if reached == k:
                    above = bound
            if thread == 0:
                places[0] = 0
            cuda.syncthreads()
            reached = collect(keys, bound, kept, places)
        return reached

    return thin


@cuda.jit(device=True, inline="always")
def bound_of(maxima, first, count, k):
    """A logit's order that at least k tokens reach, and few more; 0 if there is none. For a warp.

    It is reached by k to k + k / 8 of 256 groups of tokens, whose maxima are given.
    """
    lane = int32(cuda.threadIdx.x & 31)
    groups = cuda.local.array(GROUPS, uint32)
    for n in range(GROUPS):
        groups[n] = 0
    i = int32(lane)
    while i < count:
        for n in range(GROUPS):
            j = i + 32 * n
            if j < count:
                groups[n] = max(groups[n], uint32(maxima[first + j]))
        i = int32(i + 32 * GROUPS)
    least, most = groups[0], groups[0]
    for n in range(1, GROUPS):
        least, most = min(least, groups[n]), max(most, groups[n])
    bound, above = int64(ptx.redux_min(least)), int64(ptx.redux_max(most)) + 1
    reached = int32(32 * GROUPS)
    while reached > k + k // SLACK and above - bound > 1:
        middle = (bound + above) >> 1
        own = int32(0)
        for n in range(GROUPS):
            own += int32(groups[n] >= uint32(middle))
        count_of_middle = int32(ptx.redux_add(own))
        if count_of_middle >= k:
            bound, reached = middle, count_of_middle
        else:
            above = middle
    if bound > 0:  # an order that is a number's
        bound = max(bound, ORDER_NEGATIVE_INFINITY)
    return bound
