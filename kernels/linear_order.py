"""The order in which `linear` adds up: a function of the weight's shape, kept by all its kernels.

K is cut into units of 256, runs of units into slices, runs of slices into groups. Within a slice
one chain of mma goes up in k, 16 at a time. The sums of a group's slices are added in order, then
the sums of the groups. What lies beyond K counts as zeros.

A step is 32 k. Lane 4 g + t reads 16 bytes of a row, k = 8 t to 8 t + 7, and feeds two mma with
them: the first takes the words 0 and 1, the second 2 and 3. The k of a step are permuted by that,
alike for weights and activations, so that rows serve as they lie in memory.
"""

from typing import NamedTuple

from numba import cuda

from ddtree_numba.kernels import ptx

STEP = 32
UNIT = 256
STEPS = UNIT // STEP
WARPS = 2400  # of a chip at once, each with a unit of weights in registers: 132 x 18
SLICES = 7, 16  # at most, for many rows and for few
FEW_ROWS, LONG, GROUPS = 1024, 16, 4  # fewer rows than fill the chip: long rows go to more blocks


class Order(NamedTuple):
    groups: int
    slices: int  # of a group
    units: int  # of a slice

    @property
    def width(self) -> int:
        """The least K that leaves no slice short."""
        return self.groups * self.slices * self.units * UNIT


def order_of(rows: int, width: int) -> Order:
    """Of a weight[rows, width]: fewest units a slice; they count double where a slice is short."""
    few, many = SLICES
    units = -(-width // UNIT)
    groups = GROUPS if rows <= FEW_ROWS and units >= LONG else 1
    units = -(-units // groups)
    most = min(max(WARPS // -(-rows // 16), few), many)
    slices = min(range(1, most + 1), key=lambda n: -(-units // n) * (1 + (units % n > 0)))
    return Order(groups, slices, -(-units // slices))


@cuda.jit(device=True, inline="always")
def multiply(a, i, b, j, half, sums, n):
    """sums[n .. n+3] += half a step of weight rows a[i .. i+7] and tokens b[j .. j+3].

    Two halves of one sum should not be neighbours: the second waits for the first.
    """
    k, m = i + 2 * half, j + 2 * half
    sums[n], sums[n + 1], sums[n + 2], sums[n + 3] = ptx.mma(
        *(a[k], a[k + 4], a[k + 1], a[k + 5], b[m], b[m + 1]),
        *(sums[n], sums[n + 1], sums[n + 2], sums[n + 3]),
    )
