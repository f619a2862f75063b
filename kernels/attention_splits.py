"""Where the splits of tree attention end: a function of absolute position alone.

A chunk is CHUNK keys, half of a page: the key at position p is lane p % CHUNK of its chunk. A split
is 2^SHIFTS[i] positions long, i counting the EDGES that lie before it, and starts its running
maximum afresh. Short splits at the start give every multiprocessor a share of a short context; long
ones keep the partials of a long context few. The specification's chunks and splits are others, and
so are its last bits.
"""

from numba import cuda

CHUNK = 32
PAGE = 64
EDGES = 8192, 32768
SHIFTS = 7, 8, 10  # splits of 128, 256, 1024 positions
FIRST, SECOND = EDGES
S0, S1, S2 = SHIFTS
BEFORE1 = FIRST >> S0
BEFORE2 = BEFORE1 + ((SECOND - FIRST) >> S1)


@cuda.jit(device=True, inline="always")
def split_of(p):
    """The split that holds position p."""
    s = p >> S0
    if p >= SECOND:
        s = BEFORE2 + ((p - SECOND) >> S2)
    elif p >= FIRST:
        s = BEFORE1 + ((p - FIRST) >> S1)
    return s


@cuda.jit(device=True, inline="always")
def split_start(s):
    """The first position of split s."""
    p = s << S0
    if s >= BEFORE2:
        p = SECOND + ((s - BEFORE2) << S2)
    elif s >= BEFORE1:
        p = FIRST + ((s - BEFORE1) << S1)
    return p
