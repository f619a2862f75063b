"""A stage of the wide expert kernel: its records and the rows of pairs that they multiply."""

from numba import cuda, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.moe_arithmetic import dequantize, multiply, scales
from ddtree_numba.kernels.moe_records import BYTES, COLUMNS
from ddtree_numba.kernels.moe_tiles import NARROW, WIDE

EACH = 4  # row tiles of a warp
LINE = 2 * COLUMNS  # bytes of a pair's row along a record
LINES = WIDE * LINE
GROUPS = WIDE // NARROW
SUMS = EACH * GROUPS * 4  # of a lane
OPERANDS, WORDS_HELD, SCALES_HELD = 8 * EACH, 4 * EACH, 2 * EACH  # of a lane, for a record


@cuda.jit(device=True, inline="always")
def line_of(row, half):
    """Where the half of a pair's row lies: odd rows swap theirs, so that no bank is met twice."""
    return row * LINE + ((half ^ row) & 1) * (LINE // 2)


@cuda.jit(device=True, inline="always")
def rows_of(entry):
    """Of a tile that are multiplied: whole groups, two at least."""
    return max((entry >> 16) + 7 & -8, 16)


@cuda.jit(device=True, inline="always")
def take(weights, to_scales, part, words, group_scales):
    """A lane's words of a record of every row tile, `part` bytes apart."""
    for r in range(EACH):
        at, w = weights + r * part, 4 * r
        words[w], words[w + 1], words[w + 2], words[w + 3] = ptx.lds4(at)
        group_scales[2 * r], group_scales[2 * r + 1] = ptx.lds2(at + to_scales)


def products(groups: int, records: int):
    """A device function: a stage times `groups` groups of eight pairs, without a branch."""
    part = records * BYTES

    @cuda.jit(device=True, inline="always")
    def multiply_record(rows, other_half, then, to_scales, words, group_scales, chain):
        """Of the record in `words`, which afterwards hold the one at `then`."""
        a = cuda.local.array(OPERANDS, uint32)
        b = cuda.local.array(4, uint32)
        factors = cuda.local.array(SCALES_HELD, uint32)
        addends = cuda.local.array(SCALES_HELD, uint32)
        for h in range(2):
            for r in range(EACH):
                w = 4 * r + 2 * h
                scales(group_scales[2 * r + h], factors, addends, 2 * r)
                dequantize(words[w], factors, addends, 2 * r, a, 8 * r)
                dequantize(words[w + 1], factors, addends, 2 * r, a, 8 * r + 4)
            if h == 1:
                take(then, to_scales, part, words, group_scales)
            for g in range(groups):
                at = g * (NARROW * LINE) + h * other_half
                b[0], b[1], b[2], b[3] = ptx.lds4(rows + at)
                for j in range(2):  # two of one sum are no neighbours: the second waits
                    for r in range(EACH):
                        multiply(chain, 4 * (r * GROUPS + g), a, 8 * r + 4 * j, b, 2 * j)

    @cuda.jit(device=True, inline="always")
    def multiply_stage(now, rows, other_half, then, to_scales, words, group_scales, chain):
        """Of the stage at `now`, whose first record is in `words`."""
        if records == 2:
            second = now + BYTES
            multiply_record(rows, other_half, second, to_scales, words, group_scales, chain)
            rows = rows + LINES
        multiply_record(rows, other_half, then, to_scales, words, group_scales, chain)

    return multiply_stage
