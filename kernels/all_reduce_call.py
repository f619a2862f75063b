"""What the methods of `all_reduce` and `all_gather` share: the call's number, waits, ordered sum.

A rank counts its calls in device memory, so that a graph can be replayed unchanged. The number is
the call's epoch: what belongs to a call carries it, and its lowest bit picks one of two buffers.
Two are enough: a rank is in call n + 2 only after its call n + 1 has heard of every other rank's
call n + 1, and a rank begins that only after its call n has ended.

A wait ends when the host sets the abort word or after `limit` nanoseconds. The rank's error word
then says why, and its later calls return at once. The abort word lies across the bus, where the
reads of a grid's warps queue up for a millisecond: a thread looks there only after `patience`
polls, which take longer, or one late rank would make the next one late, and so on for ever.
"""

from functools import cache

from numba import cuda, float32, int32, uint32, uint64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16

MOST_RANKS = 16
EPOCH, TICKET, ERROR = 0, 1, 2  # words of the control block
CONTROL_WORDS = 32
ABORTED, LATE = 1, 2  # error word: this, and above its 8 bits the rank that was waited for


@cuda.jit(device=True, inline="always")
def following(epoch):
    """The call after. Zero is memory that nothing was written to; 2 is even as well."""
    epoch = uint32(epoch + 1)
    if epoch == 0:
        epoch = uint32(2)
    return epoch


@cuda.jit(device=True, inline="always")
def next_epoch(control):
    """The number of this call."""
    return following(ptx.ld_volatile(control, EPOCH))


@cuda.jit(device=True, inline="always")
def look(since, late, control, abort, limit):
    """Why to stop waiting for rank late - 1, or 0; and when the thread first looked."""
    now = ptx.globaltimer()
    if since == uint64(0):
        since = now
    why = uint32(0)
    if now - since > limit:
        why = uint32(LATE)
    if ptx.ld_volatile(abort, 0) != 0:
        why = uint32(ABORTED)
    if why != 0:
        ptx.atom_cas(control, ERROR, 0, why | (late - 1) << 8)
    return why, since


@cuda.jit(device=True, inline="always")
def end_call(control, epoch):
    """The block that comes last counts the call."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0 and ptx.atom_add(control, TICKET, 1) == cuda.gridDim.x - 1:
        ptx.st_volatile(control, TICKET, 0)
        ptx.st_volatile(control, EPOCH, epoch)


@cache
def ordered_sum(world: int, element, width: int):
    """words[k + rank * width + w], added up in the ranks' order and rounded once, into out[w].

    The sum starts from rank 0's value and not from zero: -0 stays -0.
    """

    @cuda.jit(device=True, inline="always")
    def sum_bf16(words, k, out):
        for w in range(width):
            low = ptx.as_float(words[k + w] << 16)
            high = ptx.as_float(words[k + w] & 0xFFFF0000)
            for s in range(1, world):
                low = low + ptx.as_float(words[k + s * width + w] << 16)
                high = high + ptx.as_float(words[k + s * width + w] & 0xFFFF0000)
            out[w] = ptx.pack_bf16(high, low)

    @cuda.jit(device=True, inline="always")
    def sum_float32(words, k, out):
        for w in range(width):
            total = ptx.as_float(words[k + w])
            for s in range(1, world):
                total = total + ptx.as_float(words[k + s * width + w])
            out[w] = ptx.as_bits(total)

    return {bf16: sum_bf16, float32: sum_float32}[element]


@cache
def receive_lines(world: int):
    """A device function that waits for one line of every other rank."""

    @cuda.jit(device=True, inline="always")
    def receive(lines, first, apart, i, count, a, b, words, call):
        """words[2 s], words[2 s + 1] of rank s, a and b for the own; 0, or why the wait ended.

        Line i of rank s lies s * apart + i lines behind word `first`. Those from `count` on are not
        waited for. All are read in each round: one trip to memory after the last has come.
        """
        rank, epoch, control, abort, limit, patience = call
        stopped, since = uint32(0), uint64(0)
        left, late = patience, int32(1)
        while late != 0:
            late = int32(0)
            for s in range(world):
                c, one, d, other = ptx.ld_volatile4(lines, first + (s * apart + i) * 4)
                words[2 * s] = cuda.selp(s == rank, a, c)
                words[2 * s + 1] = cuda.selp(s == rank, b, d)
                old = (one != epoch) | (other != epoch)
                if old & (s != rank) & (s * apart + i < count):
                    late = int32(s + 1)
            left -= 1
            if late != 0 and left == 0:
                left = patience
                stopped, since = look(since, late, control, abort, limit)
                if stopped != 0:
                    late = int32(0)
        return stopped

    return receive


@cache
def meet_blocks(world: int):
    """A device function in which the blocks of one index of all ranks wait for each other."""

    @cuda.jit(device=True, inline="always")
    def meet(flags, mine, first, stopped, call):
        """What any of them wrote before, all see after; not 0 for the whole block: no more waiting.

        Flag s of this block lies s words behind `first`; rank s raises it to the epoch. It may
        already be one further: rank s is then in its next call.
        """
        rank, epoch, control, abort, limit, patience = call
        cuda.syncthreads()
        thread = cuda.threadIdx.x
        if thread == 0 and stopped == 0:
            ptx.fence_sys()
            for s in range(world):
                if s != rank:
                    ptx.st_volatile(flags[s], first + rank, epoch)
        if thread < world and thread != rank and stopped == 0:
            since, left = uint64(0), patience
            after, waiting = following(epoch), True
            while waiting:
                flag = ptx.ld_acquire_sys(mine, first + thread)
                waiting = (flag != epoch) & (flag != after)
                left -= 1
                if waiting and left == 0:
                    left = patience
                    stopped, since = look(since, thread + 1, control, abort, limit)
                    waiting = stopped == 0
        return cuda.syncthreads_or(stopped)

    return meet
