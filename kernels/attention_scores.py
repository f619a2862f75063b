"""Scores and weights of one piece of tree attention: the work of SCORERS warps.

A warp multiplies one half of the width, of one tile of 16 keys if the piece has one unit, else of
both tiles with half of the units. Two warps' halves meet in shared memory; there a lane takes four
keys of a column, and eight lanes make the column's 32.
"""

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.attention_splits import CHUNK
from ddtree_numba.kernels.attention_tiles import (
    ADDING,
    ALL,
    EXCHANGE,
    GROWTH,
    LOWEST,
    SCORE_ROW,
    SCORING,
    WEIGHT_ROW,
    WEIGHTS,
    Layout,
    multiply,
    place_of,
)

FRAGMENTS = 4 * 2  # registers of keys, of both tiles


def make_scorer(layout: Layout, tail: bool):
    """Scores and weights of a piece. One unit: a warp has a key tile; more: half of the units."""
    units, row, tile, steps = layout.units, layout.row, layout.tile, layout.slice_steps
    width, total_steps = layout.width, layout.steps
    scores_at, slice_bytes = layout.scores, layout.slice
    weights_at, buffer, decay_at = layout.weights, layout.buffer, layout.decay
    columns, here_at = layout.columns, layout.here
    mine = (units + 1) // 2  # units of a warp
    halves = 1 if units == 1 else 2  # key tiles of a warp
    score_words, own_words = halves * mine * 4, mine * 4
    uneven = 2 * steps != total_steps

    @cuda.jit(device=True, inline="always")
    def load_queries(q, query, base, unit, many, parts, heads):
        """Fragments of q[node, head, :]: column lane // 4, zeros where there is no such head."""
        tid = int32(ptx.thread_x()) - ADDING
        lane, warp = tid & 31, tid >> 5
        first_unit, last_unit, slice_of = unit, unit + many, warp & 1
        if units > 1:
            first_unit = unit + (warp >> 1) * mine
        column, t = lane >> 2, lane & 3
        for n in range(mine):
            unit = first_unit + n
            head = (unit % parts) * 8 + column
            there = unit < last_unit and head < heads
            at = (base + (unit // parts) * heads + head) * width + slice_of * steps * 16 + 2 * t
            for k in range(steps):
                z = 2 * (n * steps + k)
                query[z] = uint32(0)
                query[z + 1] = uint32(0)
                if there and (not uneven or slice_of * steps + k < total_steps):
                    query[z] = ptx.ldg1(q, at + 16 * k)
                    query[z + 1] = ptx.ldg1(q, at + 16 * k + 8)

    @cuda.jit(device=True, inline="always")
    def fetch(a, at, h, j, slice_of):
        """The keys of tile h, step j."""
        if j < steps and (not uneven or slice_of * steps + j < total_steps):
            z = 4 * h
            a[z], a[z + 1], a[z + 2], a[z + 3] = ptx.ldmatrix4(at + h * 16 * row + j * 32)

    @cuda.jit(device=True, inline="always")
    def score(shared, query, turn, first, count, last, scale, pieces, i, tops, splits, all_units):
        """Weights of `count` chunks, from the block's number `turn` on; returns the next."""
        tid = int32(ptx.thread_x()) - ADDING
        lane, warp = int32(tid & 31), int32(tid >> 5)
        g, t = lane >> 2, lane & 3
        slice_of, half = warp & 1, warp >> 1
        keys = int32(shared + (lane & 15) * row + (lane >> 4) * 16 + slice_of * steps * 32)
        write = int32(shared + scores_at + slice_of * slice_bytes + 2 * t * SCORE_ROW + 4 * g)
        # a lane's four columns and its four keys in them
        four, quad = lane >> 3, int32(lane & 7)
        own = int32(half * mine * 8 + slice_of * mine * 4 + four)
        if units == 1:
            keys = int32(keys + half * 16 * row)
            write = int32(write + half * 64)
            own = int32((warp & 1) * 4 + four)
        else:
            write = int32(write + half * mine * 8 * SCORE_ROW)
        read = int32(shared + scores_at + own * SCORE_ROW + 16 * quad)
        put = int32(shared + weights_at + own * WEIGHT_ROW + 8 * quad)
        s = cuda.local.array(score_words, float32)
        top = cuda.local.array(mine, float32)
        total = cuda.local.array(mine, float32)
        high = cuda.local.array(mine, float32)  # greatest score, then the decay
        x = cuda.local.array(own_words, float32)
        a = cuda.local.array(FRAGMENTS, uint32)
        for n in range(mine):
            top[n] = LOWEST
            total[n] = float32(0)
        p = int32(first + 4 * quad)
        end = int32(turn + count)
        while turn < end:
            b = int32(turn & 1)
            at = int32(keys + b * tile)
            for z in range(score_words):
                s[z] = float32(0)
            while ptx.mbarrier_passed(shared + here_at + 8 * b, int32(turn >> 1 & 1)) == 0:
                pass
            cuda.syncwarp()
            for h in range(halves):
                fetch(a, at, h, 0, slice_of)
            for j in range(steps):
                for h in range(halves):
                    z = 4 * h
                    a0, a1, a2, a3 = a[z], a[z + 1], a[z + 2], a[z + 3]
                    fetch(a, at, h, j + 1, slice_of)  # a step ahead of its use
                    if not uneven or slice_of * steps + j < total_steps:
                        for u in range(mine):
                            y = 2 * (u * steps + j)
                            multiply(s, 4 * (h * mine + u), a0, a1, a2, a3, query, y)
            ptx.bar_sync(EXCHANGE, SCORING)  # the scores before have been read
            for h in range(halves):
                for n in range(mine):
                    z = 4 * (h * mine + n)
                    to = write + n * 8 * SCORE_ROW + 64 * h
                    ptx.sts1_f(to, s[z])
                    ptx.sts1_f(to + SCORE_ROW, s[z + 1])
                    ptx.sts1_f(to + 32, s[z + 2])
                    ptx.sts1_f(to + SCORE_ROW + 32, s[z + 3])
            ptx.bar_sync(EXCHANGE, SCORING)
            if units > 1 or warp < 2:  # each step for all columns: latencies overlap
                for n in range(mine):
                    at = int32(read + 4 * n * SCORE_ROW)
                    z = 4 * n
                    x[z], x[z + 1], x[z + 2], x[z + 3] = ptx.lds4_f(at)
                    y0, y1, y2, y3 = ptx.lds4_f(at + slice_bytes)
                    x[z] = ptx.mul(ptx.add(x[z], y0), scale)
                    x[z + 1] = ptx.mul(ptx.add(x[z + 1], y1), scale)
                    x[z + 2] = ptx.mul(ptx.add(x[z + 2], y2), scale)
                    x[z + 3] = ptx.mul(ptx.add(x[z + 3], y3), scale)
                for n in range(mine):
                    z = 4 * n
                    if tail:
                        for e in range(4):
                            if p + e > last:
                                x[z + e] = LOWEST
                    high[n] = ptx.fmax(ptx.fmax(x[z], x[z + 1]), ptx.fmax(x[z + 2], x[z + 3]))
                for e in range(3):
                    for n in range(mine):
                        high[n] = ptx.fmax(high[n], ptx.shfl_xor_f(high[n], 1 << e))
                for n in range(mine):
                    new = top[n]
                    if high[n] > ptx.add(new, GROWTH):
                        new = high[n]
                    high[n] = ptx.exp2(ptx.sub(top[n], new))
                    top[n] = new
                    for e in range(4):
                        x[4 * n + e] = ptx.exp2(ptx.sub(x[4 * n + e], new))
                for n in range(mine):
                    z = 4 * n
                    to = int32(put + b * buffer + 4 * n * WEIGHT_ROW)
                    pair = ptx.pack_bf16(x[z + 1], x[z])
                    ptx.sts2(to, pair, ptx.pack_bf16(x[z + 3], x[z + 2]))
                    if quad == 0:
                        ptx.sts1_f(shared + decay_at + 4 * (b * columns + own + 4 * n), high[n])
            ptx.bar_arrive(WEIGHTS + b, ALL)
            if units > 1 or warp < 2:
                for n in range(mine):
                    total[n] = ptx.fma(total[n], high[n], x[4 * n])
                    for e in range(1, 4):
                        total[n] = ptx.add(total[n], x[4 * n + e])
            p = int32(p + CHUNK)
            turn = int32(turn + 1)
        place, many = place_of(pieces, i, splits, all_units)
        if units > 1 or warp < 2:
            for n in range(mine):
                for e in range(3):
                    total[n] = ptx.add(total[n], ptx.shfl_xor_f(total[n], 1 << e))
                column = own + 4 * n
                if quad == 0 and column < 8 * many:
                    tops[2 * (place * 8 + column)] = top[n]
                    tops[2 * (place * 8 + column) + 1] = total[n]
        return turn

    return load_queries, score
