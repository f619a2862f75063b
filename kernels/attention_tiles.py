"""How a block of tree attention lays out its shared memory, and what it knows of its pieces.

    a ring of tiles of CHUNK keys: two, one multiplied and one filled, or more (deep)
    scores of four quarters of the width; two sets in turn (deep)
    weights: in the place of the first quarter's scores, or their own (deep)
    the decays of the sums; the list of the block's pieces

Sixteen bytes of row r lie in their line of 128 where their number ^ (r & 7) says: the same column
of eight rows is in different banks, and a copy of 128 bytes of a key fills one row of banks.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.attention_plan import ITEM
from ddtree_numba.kernels.attention_splits import CHUNK

WARPS = 8
THREADS = 32 * WARPS
QUARTERS = 4  # of the width, in scores: two warps each, one for sixteen keys
SCORE_ROW = 4 * CHUNK + 16  # bytes of a column's scores
WEIGHT_ROW = 2 * CHUNK + 16  # and of its weights (deep)
SHALLOW = 2  # tiles of a ring that is not deep
RECORD = ITEM + 4  # words of a piece in the list: the item, its `Rows`, the next item's number
WINDOW = 64  # pieces that a block has in shared memory
GROWTH = float32(8)  # powers of two that a score may exceed the maximum by
LOWEST = float32(-3e38)  # finite, so that a difference of two is no NaN


class Batch(NamedTuple):
    """Where a step's keys lie, as `spec/tree_attention.py` has them."""

    pages: Any
    scratch: Any
    page_table: Any
    paths: Any


class Owner(NamedTuple):
    request: int
    unit: int  # the first
    units: int


class Span(NamedTuple):
    chunks: int
    last: int  # the last position that the piece sees
    split: int
    start: int  # committed positions of the request


class Rows(NamedTuple):
    """Where a piece's entries begin."""

    table: int  # of page_table
    path: int  # of paths
    scratch: int  # of scratch, in keys


class Layout:
    """Bytes in shared memory, and how much is whose, for one width and number of units."""

    def __init__(self, width: int, latent: int, units: int, ring: int):
        self.deep = ring > SHALLOW
        self.row = -(-2 * width // 128) * 128
        self.tile = CHUNK * self.row
        self.last = (ring - 1) * self.tile  # where the last tile begins
        self.scores = ring * self.tile
        self.quarter = 8 * units * SCORE_ROW
        self.set = QUARTERS * self.quarter
        behind = self.scores + (1 + self.deep) * self.set
        self.weights = behind if self.deep else self.scores
        self.weight_row = WEIGHT_ROW if self.deep else SCORE_ROW
        self.decays = behind + self.deep * 8 * units * WEIGHT_ROW
        self.list = self.decays + 32 * units
        self.bytes = self.list + 4 * RECORD * WINDOW
        self.pieces = width // 8  # of a key, 16 bytes each
        self.copies = -(-self.pieces // (THREADS // CHUNK))  # of a thread
        self.all_steps = width // 16
        self.steps = -(-self.all_steps // QUARTERS)  # of 16 columns in a quarter
        self.tiles = latent // 16
        self.each = -(-self.tiles // WARPS)  # tiles of latent columns a warp


@cuda.jit(device=True, inline="always")
def owner_of(list_at, i):
    """Whose piece i is."""
    request, unit, units, _ = ptx.lds4(list_at + 4 * RECORD * i)
    return Owner(int32(request), int32(unit), int32(units))


@cuda.jit(device=True, inline="always")
def first_of(list_at, i):
    """The first position of piece i."""
    _, _, _, first = ptx.lds4(list_at + 4 * RECORD * i)
    return int32(first)


@cuda.jit(device=True, inline="always")
def span_of(list_at, i):
    """What piece i spans."""
    chunks, last, split, start = ptx.lds4(list_at + 4 * RECORD * i + 16)
    return Span(int32(chunks), int32(last), int32(split), int32(start))


@cuda.jit(device=True, inline="always")
def same_owner(list_at, i):
    """Whether piece i has the units of the one before it."""
    a, b = owner_of(list_at, i), owner_of(list_at, i - 1)
    return a.request == b.request and a.unit == b.unit and a.units == b.units


@cuda.jit(device=True, inline="always")
def rows_of(list_at, i):
    table, path, scratch, _ = ptx.lds4(list_at + 4 * RECORD * i + 4 * ITEM)
    return Rows(int32(table), int32(path), int32(scratch))


@cuda.jit(device=True, inline="always")
def item_after(list_at, i):
    """The number of the item behind piece i."""
    _, _, _, item = ptx.lds4(list_at + 4 * RECORD * i + 4 * ITEM)
    return int32(item)
