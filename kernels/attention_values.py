"""Sums of the values of tree attention's pieces: the work of ADDERS warps.

A warp has `each` tiles of 16 latent columns. When it has added these columns of one tile of keys,
it copies them of the tile after next into their place.
"""

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.attention_copies import make_copier
from ddtree_numba.kernels.attention_splits import CHUNK, PAGE
from ddtree_numba.kernels.attention_tiles import (
    ADDERS,
    ALL,
    WEIGHT_ROW,
    WEIGHTS,
    Layout,
    multiply,
    place_of,
    span_of,
)


def make_adder(layout: Layout, tail: bool):
    """`add_run` for pieces of one kind."""
    units, row, tile, each = layout.units, layout.row, layout.tile, layout.each
    tiles = layout.tiles
    weights_at, buffer, decay_at = layout.weights, layout.buffer, layout.decay
    columns, here_at = layout.columns, layout.here
    sums = each * units * 4
    words = 4 * ((units + 1) // 2)
    even = tiles == each * ADDERS
    copy_half, page_of, prefetch, piece_of = make_copier(layout, tail)

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
    def add_half(acc, values, weights):
        """acc += values of 16 keys * their weights, both by the lane's address."""
        weight = cuda.local.array(words, uint32)
        for n in range(0, units - 1, 2):
            z = 2 * n
            weight[z], weight[z + 1], weight[z + 2], weight[z + 3] = ptx.ldmatrix4(
                weights + n * 8 * WEIGHT_ROW
            )
        if units == 1:
            weight[0], weight[1] = ptx.ldmatrix2(weights)
        for j in range(each):
            a0, a1, a2, a3 = ptx.ldmatrix4_t(values + 32 * j)
            for n in range(units):
                multiply(acc, 4 * (each * n + j), a0, a1, a2, a3, weight, 2 * n)

    @cuda.jit(device=True, inline="always")
    def store_sums(acc, partial, place, many, tid):
        lane, warp = tid & 31, tid >> 5
        if even or warp * each < tiles:
            to = ptx.at(partial, ((place * tiles + warp * each) * 32 + lane) * 4)
            for n in range(units):
                if n < many:
                    for j in range(each):
                        z = 4 * (each * n + j)
                        at = (n * tiles + j) * 128
                        ptx.stg4_f(to, at, acc[z], acc[z + 1], acc[z + 2], acc[z + 3])

    @cuda.jit(device=True, inline="always")
    def add_run(
        shared,
        pages,
        scratch,
        page_table,
        starts,
        paths,
        pieces,
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
        tid = int32(ptx.thread_x())
        lane, warp = int32(tid & 31), int32(tid >> 5)
        key, side = int32((lane >> 4) * 8 + (lane & 7)), int32((lane >> 3 & 1) * 16)
        values = int32(shared + key * row + warp * each * 32 + side)
        weights = int32(shared + weights_at + key * WEIGHT_ROW + side)
        decays = int32(shared + decay_at + 8 * (lane & 3))
        acc = cuda.local.array(sums, float32)
        ahead = int32(i)  # the piece that is copied
        p, left, table, path, first_node, start, last = piece_of(
            pieces, ahead, end, starts, table_width, nodes, parts, depths
        )
        page = page_of(page_table, table, p, left, start)
        page_after = int32(-1)  # of the chunk two further on, to be brought to L2
        n = int32(0)
        while n < 2 and left > 0:
            b = int32((turn + n) & 1)
            for h in range(2):
                to, at = int32(shared + b * tile + 16 * h * row), int32(p + 16 * h)
                copy_half(
                    to,
                    pages,
                    scratch,
                    page_table,
                    paths,
                    at,
                    page,
                    table,
                    path,
                    first_node,
                    start,
                    last,
                    tid,
                )
            ptx.copy_arrive(shared + here_at + 8 * b)
            p, left = int32(p + CHUNK), int32(left - 1)
            if left == 0:
                ahead = int32(ahead + 1)
                p, left, table, path, first_node, start, last = piece_of(
                    pieces, ahead, end, starts, table_width, nodes, parts, depths
                )
            page = page_of(page_table, table, p, left, start)
            n = int32(n + 1)
        run = True
        while run:
            _, _, _, count, _, _ = span_of(pieces, i)
            done = int32(turn + count)
            for z in range(sums):
                acc[z] = float32(0)
            while turn < done:
                b = int32(turn & 1)
                ptx.bar_wait(WEIGHTS + b, ALL)
                if even or warp * each < tiles:
                    scale_sums(acc, int32(decays + 4 * b * columns))
                for h in range(2):
                    if even or warp * each < tiles:
                        add_half(
                            acc,
                            int32(values + b * tile + 16 * h * row),
                            int32(weights + b * buffer + 32 * h),
                        )
                    cuda.syncwarp()
                    if left > 0:
                        to, at = int32(shared + b * tile + 16 * h * row), int32(p + 16 * h)
                        copy_half(
                            to,
                            pages,
                            scratch,
                            page_table,
                            paths,
                            at,
                            page,
                            table,
                            path,
                            first_node,
                            start,
                            last,
                            tid,
                        )
                if left > 0:
                    ptx.copy_arrive(shared + here_at + 8 * b)
                    prefetch(pages, page_after, p, tid)
                    p, left = int32(p + CHUNK), int32(left - 1)
                    if left == 0:
                        ahead = int32(ahead + 1)
                        p, left, table, path, first_node, start, last = piece_of(
                            pieces, ahead, end, starts, table_width, nodes, parts, depths
                        )
                    page = page_of(page_table, table, p, left, start)
                    page_after = int32(-1)
                    if left > 0 and p + PAGE + CHUNK <= (start if tail else last + 1):
                        page_after = int32(page_table[table + (p >> 6) + 1])
                turn = int32(turn + 1)
            place, many = place_of(pieces, i, splits, nodes * parts)
            store_sums(acc, partial, place, many, tid)
            i = int32(i + 1)
            run = False
            if i < end:
                _, _, _, _, _, is_tail = span_of(pieces, i)
                run = tail == (is_tail != 0)
        return i, turn

    return add_run
