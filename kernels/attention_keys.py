"""Keys of tree attention on their way to a tile: which is next, where it lies, and its copy."""

from types import SimpleNamespace

from numba import cuda, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.attention_plan import ITEM
from ddtree_numba.kernels.attention_splits import CHUNK, PAGE
from ddtree_numba.kernels.attention_tiles import (
    RECORD,
    Layout,
    first_of,
    rows_of,
    span_of,
)


def make_keys(layout: Layout, width: int) -> SimpleNamespace:
    pieces = layout.pieces

    @cuda.jit(device=True, inline="always")
    def put_record(list_at, k, items, i, nodes, parts, depths, table_width):
        """Item i to place k of the list, with its `Rows` and the number of the next item."""
        request, unit, units, first = ptx.ldg4(items, i * ITEM)
        chunks, last, split, start = ptx.ldg4(items, i * ITEM + 4)
        to = list_at + 4 * RECORD * k
        ptx.sts1(to, request)
        ptx.sts1(to + 4, unit)
        ptx.sts1(to + 8, units)
        ptx.sts1(to + 12, first)
        ptx.sts1(to + 16, chunks)
        ptx.sts1(to + 20, last)
        ptx.sts1(to + 24, split)
        ptx.sts1(to + 28, start)
        scratch = int32(request) * nodes
        ptx.sts1(to + 32, int32(request) * table_width)
        ptx.sts1(to + 36, (scratch + int32(ptx.divide(unit, parts))) * depths)
        ptx.sts1(to + 40, scratch)
        ptx.sts1(to + 44, i + 1)

    @cuda.jit(device=True, inline="always")
    def entry_at(batch, list_at, i, p):
        """(entry, place) of the key at p for piece i of the list, as `key_at` takes them.

        Behind the last position that the piece sees, it is that one's. An entry of page_table with
        the place in its page, or one of paths with -1 less its request's first row of scratch.
        """
        span, rows = span_of(list_at, i), rows_of(list_at, i)
        p = min(int32(p), span.last)
        over = int32(p - span.start)
        entries, at, place = batch.page_table, rows.table + (p >> 6), int32(p & (PAGE - 1))
        if over >= 0:
            entries, at, place = batch.paths, rows.path + over, int32(-1 - rows.scratch)
        return int32(entries[at]), place

    @cuda.jit(device=True, inline="always")
    def key_at(batch, entry, place, piece):
        """Sixteen bytes, number `piece`, of a key."""
        keys, row = batch.pages, entry * PAGE + place
        if place < 0:
            keys, row = batch.scratch, entry - 1 - place
        return ptx.at(keys, row * width + piece * 8)

    @cuda.jit(device=True, inline="always")
    def copy(to, key, piece, begin, end):
        """16-byte pieces number `piece` + 8 n of a key, for n from begin to end - 1."""
        for n in range(begin, end):
            if 8 * n + 8 <= pieces or piece + 8 * n < pieces:
                ptx.copy16(to + n * 128, key, n * 64)

    @cuda.jit(device=True, inline="always")
    def chunk_after(list_at, i, p, end):
        """Piece and first position of the chunk behind the one at p of piece i, of `end` pieces.

        Behind the last chunk: piece `end`, and a position of the last piece.
        """
        own = min(i, int32(end - 1))
        beyond = min(int32(i + 1), end)
        p = int32(p + CHUNK)
        behind = int32(first_of(list_at, own) + CHUNK * span_of(list_at, own).chunks)
        fresh = first_of(list_at, min(beyond, int32(end - 1)))
        if p >= behind:
            i, p = int32(beyond), fresh
        return int32(i), p

    return SimpleNamespace(
        put_record=put_record, entry_at=entry_at, key_at=key_at, copy=copy, chunk_after=chunk_after
    )
