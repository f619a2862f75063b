"""Copies of a piece's keys and the sums of its values: the work of ADDERS warps.

A warp has `each` tiles of 16 latent columns. It copies these columns of every key, and when it has
added them for one tile, copies them of the tile after next into their place.
"""

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.attention_plan import place_of, span_of
from ddtree_numba.kernels.attention_splits import CHUNK, PAGE
from ddtree_numba.kernels.attention_tiles import (
    ADDERS,
    ADDING,
    ALL,
    WEIGHT_ROW,
    WEIGHTS,
    Layout,
    multiply,
)


def make_adder(layout: Layout, tail: bool):
    """`add` of one piece for a tail, of a run of pieces for what is shared."""
    units, row, tile, each = layout.units, layout.row, layout.tile, layout.each
    width, latent, tiles = layout.width, layout.latent, layout.tiles
    weights_at, buffer, decay_at = layout.weights, layout.buffer, layout.decay
    columns, here_at = layout.columns, layout.here
    sums = each * units * 4
    words = 4 * ((units + 1) // 2)
    pieces = 2 * each  # of 16 bytes, that a warp copies of a row
    copies = 16 * pieces // 32  # a lane, of half a tile
    rope = (width - latent) // 8  # pieces that no value needs; a thread copies one or none
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
        shared, pages, scratch, page_table, paths, b, h, p, page, table, path, nodes, start, last
    ):
        """The warp's columns, and its share of the rest, of 16 keys of the chunk at position p.

        page: of the whole chunk, or -1 where some of it is not committed.
        """
        tid = int32(ptx.thread_x())
        lane, warp = tid & 31, tid >> 5
        whole = not tail or page >= 0
        base = (page * PAGE + p % PAGE + 16 * h) * width
        tile_row = int32(shared + b * tile + 16 * h * row)
        if even or warp * each < tiles:
            for i in range(copies):
                piece = i * 32 + lane
                key, column = piece // pieces, (warp * pieces + piece % pieces) * 8
                to = int32(tile_row + key * row + 2 * column)
                if whole:
                    ptx.copy16(to, pages, base + key * width + column)
                else:
                    at = p + 16 * h + key
                    copy_row(
                        to,
                        pages,
                        scratch,
                        page_table,
                        paths,
                        table,
                        path,
                        nodes,
                        start,
                        last,
                        at,
                        column,
                    )
        if rope > 0 and tid < 16 * rope:
            key, column = tid // rope, latent + tid % rope * 8
            to = int32(tile_row + key * row + 2 * column)
            if whole:
                ptx.copy16(to, pages, base + key * width + column)
            else:
                at = p + 16 * h + key
                copy_row(
                    to,
                    pages,
                    scratch,
                    page_table,
                    paths,
                    table,
                    path,
                    nodes,
                    start,
                    last,
                    at,
                    column,
                )

    @cuda.jit(device=True, inline="always")
    def page_of(page_table, table, p, left, start):
        """The page of the chunk at p, if there is one to copy and all of it is committed."""
        page = int32(-1)
        if left > 0 and (not tail or p + CHUNK <= start):
            page = int32(page_table[table + p // PAGE])
        return page

    @cuda.jit(device=True, inline="always")
    def prefetch(pages, page, p):
        """Brings the chunk at p, if it is committed in full, to L2."""
        tid = int32(ptx.thread_x())
        if page >= 0:
            base = (page * PAGE + p % PAGE) * width
            for i in range(lines):
                line = i * ADDING + tid
                if line * 64 < CHUNK * width:
                    ptx.prefetch_l2(pages, base + line * 64)

    @cuda.jit(device=True, inline="always")
    def piece_of(items, i, end, starts, table_width, nodes, parts, depths):
        """Position, chunks, offsets of page table, path, nodes, start, last; 0 chunks: none."""
        p, left, table, path = int32(0), int32(0), int32(0), int32(0)
        first_node, start, last = int32(0), int32(0), int32(0)
        if i < end:
            r, unit, first, count, last_seen, is_tail = span_of(items, i)
            if tail == (is_tail != 0):
                p, left, last = first, count, last_seen
                table = int32(r * table_width)
                if tail:
                    first_node = int32(r * nodes)
                    path = int32((r * nodes + unit // parts) * depths)
                    start = int32(starts[r])
        return p, left, table, path, first_node, start, last

    @cuda.jit(device=True, inline="always")
    def scale_sums(acc, decays):
        """acc *= decay of its column, where any has one below 1: rare."""
        low = float32(1)
        for n in range(units):
            f0, f1 = ptx.lds2_f(decays + 32 * n)
            low = ptx.fmin(low, ptx.fmin(f0, f1))
        if low < float32(1):
            for n in range(units):
                f0, f1 = ptx.lds2_f(decays + 32 * n)
                for j in range(each):
                    z = 4 * (each * n + j)
                    acc[z] = ptx.mul(acc[z], f0)
                    acc[z + 1] = ptx.mul(acc[z + 1], f1)
                    acc[z + 2] = ptx.mul(acc[z + 2], f0)
                    acc[z + 3] = ptx.mul(acc[z + 3], f1)

    @cuda.jit(device=True, inline="always")
    def add_half(shared, acc, b, h):
        """acc += values of 16 keys * their weights."""
        tid = int32(ptx.thread_x())
        lane, warp = tid & 31, tid >> 5
        key = (lane >> 4) * 8 + (lane & 7)
        weight = cuda.local.array(words, uint32)
        pair = int32(
            shared + weights_at + b * buffer + key * WEIGHT_ROW + (lane >> 3 & 1) * 16 + 32 * h
        )
        for n in range(0, units - 1, 2):
            z = 2 * n
            weight[z], weight[z + 1], weight[z + 2], weight[z + 3] = ptx.ldmatrix4(
                pair + n * 8 * WEIGHT_ROW
            )
        if units == 1:
            weight[0], weight[1] = ptx.ldmatrix2(pair)
        at = int32(
            shared + b * tile + (16 * h + key) * row + warp * each * 32 + (lane >> 3 & 1) * 16
        )
        for j in range(each):
            a0, a1, a2, a3 = ptx.ldmatrix4_t(at + 32 * j)
            for n in range(units):
                multiply(acc, 4 * (each * n + j), a0, a1, a2, a3, weight, 2 * n)

    @cuda.jit(device=True, inline="always")
    def store_sums(acc, partial, place, many):
        tid = int32(ptx.thread_x())
        lane, warp = tid & 31, tid >> 5
        if even or warp * each < tiles:
            for n in range(units):
                if n < many:
                    at = (((place + n) * tiles + warp * each) * 32 + lane) * 4
                    for j in range(each):
                        z = 4 * (each * n + j)
                        ptx.stg4_f(
                            partial, at + 128 * j, acc[z], acc[z + 1], acc[z + 2], acc[z + 3]
                        )

    @cuda.jit(device=True, inline="always")
    def add_run(
        shared,
        pages,
        scratch,
        page_table,
        starts,
        paths,
        items,
        i,
        end,
        turn,
        partial,
        splits,
        nodes,
        parts,
        depths,
        table_width,
    ):
        """The pieces from i on that are of this kind; returns the next, and chunks done so far.

        Copies run two chunks ahead of sums, on into the next piece.
        """
        acc = cuda.local.array(sums, float32)
        ahead = int32(i)  # the piece that is copied
        p, left, table, path, first_node, start, last = piece_of(
            items, ahead, end, starts, table_width, nodes, parts, depths
        )
        page = page_of(page_table, table, p, left, start)
        page_after = int32(-1)  # of the chunk two further on, to be brought to L2
        run, k = int32(1), int32(-2)  # two rounds of copies alone
        count = int32(0)
        while run:
            b = (turn + k) & 1
            if k == 0:
                _, _, _, count, _, _ = span_of(items, i)
                for z in range(sums):
                    acc[z] = float32(0)
            if k >= 0:
                ptx.bar_wait(WEIGHTS + b, ALL)
                if even or (ptx.thread_x() >> 5) * each < tiles:
                    at = int32(decay_at + 4 * b * columns + 8 * (ptx.thread_x() & 3))
                    scale_sums(acc, shared + at)
            for h in range(2):
                if k >= 0 and (even or (ptx.thread_x() >> 5) * each < tiles):
                    add_half(shared, acc, b, h)
                cuda.syncwarp()
                if left > 0:
                    copy_half(
                        shared,
                        pages,
                        scratch,
                        page_table,
                        paths,
                        b,
                        h,
                        p,
                        page,
                        table,
                        path,
                        first_node,
                        start,
                        last,
                    )
            if left > 0:
                ptx.copy_arrive(shared + here_at + 8 * b)
                prefetch(pages, page_after, p)
                p += CHUNK
                left -= 1
                if left == 0:
                    ahead += 1
                    p, left, table, path, first_node, start, last = piece_of(
                        items, ahead, end, starts, table_width, nodes, parts, depths
                    )
                page = page_of(page_table, table, p, left, start)
                page_after = int32(-1)
                if left > 0 and p + PAGE + CHUNK <= (start if tail else last + 1):
                    page_after = int32(page_table[table + p // PAGE + 1])
            k += 1
            if k == count and k > 0:
                place, many = place_of(items, i, splits, nodes * parts)
                store_sums(acc, partial, place, many)
                turn += count
                k = int32(0)
                i += 1
                run = int32(0)
                if i < end:
                    _, _, _, _, _, is_tail = span_of(items, i)
                    if tail == (is_tail != 0):
                        run = int32(1)
        return i, turn

    return add_run
