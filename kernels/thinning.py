"""The greatest k of a block's keys, out of thousands, and a few more: without sorting them.

The k-th greatest of the threads' own maxima is a bound that at least k keys reach, and few more as
a rule. It is found by halving an interval, a barrier that counts being one step. Where too many
keys reach it, because a few threads hold all great ones, the exact k-th key is found in the same
way, with all keys counted.
"""

from functools import cache

from numba import cuda, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.numerics import ID_BITS
from ddtree_numba.kernels.vocabulary import MOST_WARPS


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
