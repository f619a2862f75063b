"""What the two roles of a block of tree attention share: tiles of keys, their layout, barriers.

Twelve warps work on two tiles of CHUNK keys. SCORERS of them hold the queries in registers and turn
tile k + 1 into weights while ADDERS, which hold the sums, add the values of tile k:

    scores   S^T[32 keys, 8 units] = K Q^T, in two halves of the width, added in that order
    weights  e = 2^(S - top); top moves only when a score outgrows it by 2^8, and then the sums are
             scaled; rounded to bfloat16 for the values, not for their total
    values   O^T[latent, 8 units] += V^T[latent, 32 keys] e^T, 16 rows of latent a tile

Keys, then latent columns, are the mma's 16 rows, eight heads of a node its 8 columns: no column
knows how many others there are. A tile is there when its mbarrier's phase has ended; its weights
are there when the named barrier WEIGHTS opens. There are two of each, taken in turn.
"""

from numba import cuda, float32, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.attention_plan import ITEM
from ddtree_numba.kernels.attention_splits import CHUNK

ADDERS, SCORERS = 8, 4  # warps
THREADS = 32 * (ADDERS + SCORERS)
ALL, SCORING, ADDING = THREADS, 32 * SCORERS, 32 * ADDERS
EXCHANGE, WEIGHTS = 1, 2  # named barriers; the latter is two, one a buffer
SCORE_ROW = 4 * CHUNK + 16  # bytes of a column's scores, and of its weights: the sixteen bytes
WEIGHT_ROW = 2 * CHUNK + 16  # put eight rows into different banks, as in a row of keys
WINDOW = 64  # pieces that a block has in shared memory
GROWTH = float32(8)  # powers of two that a score may exceed top by
LOWEST = float32(-3e38)  # finite, so that a difference of two is no NaN


class Layout:
    """Byte offsets in shared memory, and who does what, for one width and number of units."""

    def __init__(self, width: int, latent: int, units: int, most_units: int):
        self.width, self.latent, self.units = width, latent, units
        self.row = 2 * width + 16
        self.tile = CHUNK * self.row
        self.columns = 8 * units
        self.scores = 2 * self.tile
        self.slice = self.columns * SCORE_ROW
        self.weights = self.scores + 2 * self.slice
        self.buffer = self.columns * WEIGHT_ROW
        self.decay = self.weights + 2 * self.buffer
        column = 2 * (SCORE_ROW + WEIGHT_ROW + 4)
        self.here = self.scores + 8 * most_units * column  # mbarriers of the tiles
        self.list = self.here + 16
        self.bytes = self.list + 4 * ITEM * WINDOW
        self.tiles = latent // 16
        self.each = -(-self.tiles // ADDERS)  # tiles of latent columns a warp
        self.steps = width // 16
        self.slice_steps = -(-self.steps // 2)


@cuda.jit(device=True, inline="always")
def multiply(d, z, a0, a1, a2, a3, b, y):
    """d[z : z + 4] += a * b[y : y + 2], fragments of an mma."""
    d[z], d[z + 1], d[z + 2], d[z + 3] = ptx.mma(
        a0, a1, a2, a3, b[y], b[y + 1], d[z], d[z + 1], d[z + 2], d[z + 3]
    )


@cuda.jit(device=True, inline="always")
def span_of(pieces, i):
    """Request, first unit, first position, chunks, last position, 1 for a tail."""
    r, unit, _, first = ptx.lds4(pieces + 4 * ITEM * i)
    chunks, last, _, tail = ptx.lds4(pieces + 4 * ITEM * i + 16)
    return int32(r), int32(unit), int32(first), int32(chunks), int32(last), int32(tail)


@cuda.jit(device=True, inline="always")
def place_of(pieces, i, splits, units):
    """Where the piece's partials go: [request, split, unit] as one index; and how many units."""
    r, unit, many, _ = ptx.lds4(pieces + 4 * ITEM * i)
    _, _, split, _ = ptx.lds4(pieces + 4 * ITEM * i + 16)
    return int32((int32(r) * splits + int32(split)) * units + int32(unit)), int32(many)


@cuda.jit(device=True, inline="always")
def same_units(pieces, i):
    """Whether piece i is shared by the units of the one before it."""
    r, unit, _, _, _, _ = span_of(pieces, i - 1)
    next_r, next_unit, _, _, _, tail = span_of(pieces, i)
    return tail == 0 and next_r == r and next_unit == unit
