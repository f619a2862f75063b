"""Copies of the keys of tree attention into tiles, by ADDERS warps.

A warp copies its own latent columns of every key, so that no other warp waits for it; the columns
behind them, which no value needs, are shared out by thread. A key comes from its page, or from
scratch along the unit's path.
"""

from numba import cuda, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.attention_splits import CHUNK, PAGE
from ddtree_numba.kernels.attention_tiles import ADDERS, ADDING, Layout, span_of


def make_copier(layout: Layout, tail: bool):
    """copy_half, page_of, prefetch, piece_of for pieces of one kind."""
    row, each, width, latent = layout.row, layout.each, layout.width, layout.latent
    tiles = layout.tiles
    across = 2 * each  # lanes that copy the warp's columns of a row, 16 bytes each
    down = 32 // across  # rows of one copy
    copies = 16 // down
    rope = (width - latent) // 8  # 16-byte pieces of a row that no value needs
    even = tiles == each * ADDERS
    lines = -(-CHUNK * width // (64 * ADDING))  # of 128 bytes in a chunk, a thread

    @cuda.jit(device=True, inline="always")
    def copy_row(to, pages, scratch, page_table, paths, table, path, nodes, start, last, p, column):
        """16 bytes of the key at p, or at the last position that is seen."""
        p = min(p, last)
        if p < start:
            page = int32(page_table[table + p // PAGE])
            ptx.copy16(to, pages, (page * PAGE + p % PAGE) * width + column)
        else:
            node = int32(paths[path + p - start])
            ptx.copy16(to, scratch, (nodes + node) * width + column)

    @cuda.jit(device=True, inline="always")
    def copy_half(
        to, pages, scratch, page_table, paths, p, page, table, path, nodes, start, last, tid
    ):
        """The warp's columns, and its share of the rest, of 16 keys from position p on.

        to: their place. page: of the whole chunk, or -1 where some of it is not committed.
        """
        lane, warp = tid & 31, tid >> 5
        key, column = int32(lane // across), int32((warp * across + lane % across) * 8)
        rope_key, rope_column = int32(tid // max(rope, 1)), int32(latent + tid % max(rope, 1) * 8)
        here, rope_here = int32(to + key * row + 2 * column), to + rope_key * row + 2 * rope_column
        if not tail or page >= 0:
            keys = ptx.at(pages, (page * PAGE + p % PAGE) * width)
            if even or warp * each < tiles:
                mine = ptx.at(keys, int32(key * width + column))
                for i in range(copies):
                    ptx.copy16(here + i * down * row, mine, i * down * width)
            if rope > 0 and tid < 16 * rope:
                ptx.copy16(rope_here, keys, int32(rope_key * width + rope_column))
        else:
            if even or warp * each < tiles:
                for i in range(copies):
                    copy_row(
                        here + i * down * row,
                        pages,
                        scratch,
                        page_table,
                        paths,
                        table,
                        path,
                        nodes,
                        start,
                        last,
                        p + key + i * down,
                        column,
                    )
            if rope > 0 and tid < 16 * rope:
                copy_row(
                    rope_here,
                    pages,
                    scratch,
                    page_table,
                    paths,
                    table,
                    path,
                    nodes,
                    start,
                    last,
                    p + rope_key,
                    rope_column,
                )

    @cuda.jit(device=True, inline="always")
    def page_of(page_table, table, p, left, start):
        """The page of the chunk at p, if there is one to copy and all of it is committed."""
        page = int32(-1)
        if left > 0 and (not tail or p + CHUNK <= start):
            page = int32(page_table[table + (p >> 6)])
        return page

    @cuda.jit(device=True, inline="always")
    def prefetch(pages, page, p, tid):
        """Brings the chunk at p, if it is committed in full, to L2."""
        if page >= 0:
            keys = ptx.at(pages, (page * PAGE + p % PAGE) * width)
            for i in range(lines):
                if (i * ADDING + tid) * 64 < CHUNK * width:
                    ptx.prefetch_l2(keys, int32(tid * 64) + i * ADDING * 64)

    @cuda.jit(device=True, inline="always")
    def piece_of(pieces, i, end, starts, table_width, nodes, parts, depths):
        """Position, chunks, offsets of page table, path, nodes, start, last; 0 chunks: none."""
        p, left, table, path = int32(0), int32(0), int32(0), int32(0)
        first_node, start, last = int32(0), int32(0), int32(0)
        if i < end:
            r, unit, first, count, last_seen, is_tail = span_of(pieces, i)
            if tail == (is_tail != 0):
                p, left, last = first, count, last_seen
                table = int32(r * table_width)
                if tail:
                    first_node = int32(r * nodes)
                    path = int32((r * nodes + unit // parts) * depths)
                    start = int32(starts[r])
        return p, left, table, path, first_node, start, last

    return copy_half, page_of, prefetch, piece_of
