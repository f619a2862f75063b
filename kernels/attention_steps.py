"""The steps that a block of tree attention takes for a chunk of keys: scores, weights, values.

    scores   S^T[16 keys, 8 heads] = K Q^T over a quarter of the width, by each of eight warps
    weights  the quarters are added in order; e = 2^(S - top), a warp a head, a lane a key
    values   O^T[latent, 8 heads] += V^T[latent, 32 keys] e^T, 64 rows of latent a warp

Keys, then latent columns, are the mma's 16 rows, eight heads of a node its 8 columns: no column
knows how many others there are. top moves only when a score outgrows it by 2^8, and then the sums
are scaled. Weights are rounded to bfloat16 for the values, not for their total. Between the steps
stand the barriers of `attention_partials.py` or `attention_pipelined.py`.
"""

from types import SimpleNamespace

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.attention_splits import CHUNK
from ddtree_numba.kernels.attention_tiles import (
    GROWTH,
    LOWEST,
    SCORE_ROW,
    WARPS,
    Layout,
)
from ddtree_numba.kernels.tensor_cores import multiply

UNIT = 8 * SCORE_ROW  # bytes from a unit's scores to the next one's


def make_steps(layout: Layout, width: int, units: int) -> SimpleNamespace:
    row, steps, all_steps, each = layout.row, layout.steps, layout.all_steps, layout.each
    quarter, deep, scores_at, decays_at = layout.quarter, layout.deep, layout.scores, layout.decays
    weights_at, weight_row = layout.weights, layout.weight_row
    weight_unit = 8 * weight_row
    even_steps, even_tiles = 4 * steps == all_steps, layout.each * WARPS == layout.tiles
    tiles, pieces, copies = layout.tiles, layout.pieces, layout.copies
    weight_words = 4 * units

    @cuda.jit(device=True, inline="always")
    def place_of_query(shared, spare, r):
        """Row r of the queries on their way: a tile's rows, then the place of scores."""
        place = spare + r * row
        if r >= CHUNK:
            place = shared + scores_at + (r - CHUNK) * row
        return place

    @cuda.jit(device=True, inline="always")
    def copy_queries(q, shared, spare, owner, nodes, parts, heads, tid):
        """q[node, head, :] to row n * 8 + column, zeros where there is no such head."""
        for turn in range(-(-units * 8 // CHUNK)):
            r, piece = turn * CHUNK + (tid >> 3), tid & 7
            n = r >> 3
            if n < units:
                node = ptx.divide(owner.unit + n, parts)
                head = (owner.unit + n - node * parts) * 8 + (r & 7)
                size = 16 if n < owner.units and head < heads else 0
                at = piece * 8
                if size:
                    at = at + ((owner.request * nodes + node) * heads + head) * width
                to = place_of_query(shared, spare, r) + ((piece ^ (r & 7)) << 4)
                for k in range(copies):
                    if 8 * k + 8 <= pieces or piece + 8 * k < pieces:
                        ptx.copy16_part(to + k * 128, q, at + k * 64, size)

    @cuda.jit(device=True, inline="always")
    def load_queries(query, shared, spare, lane, part):
        """The warp's quarter of all columns, as second operands."""
        for n in range(units):
            at = place_of_query(shared, spare, n * 8) + (lane & 7) * row
            column = (lane >> 3 & 1) * 16 + part * (steps * 32)
            for k in range(steps):
                z = 2 * (n * steps + k)
                query[z] = uint32(0)
                query[z + 1] = uint32(0)
                if even_steps or part * steps + k < all_steps:
                    query[z], query[z + 1] = ptx.ldmatrix2(at + (column + k * 32 ^ (lane & 7) << 4))

    @cuda.jit(device=True, inline="always")
    def place_of_key(shared, lane, half, part):
        """Where the lane's key begins for the warp's quarter, of a tile at 0, before the ^."""
        return shared + (half * 16 + (lane & 15)) * row + (lane >> 4) * 16 + part * (steps * 32)

    @cuda.jit(device=True, inline="always")
    def score_step(query, score, keys, lane, k, part):
        """Sixteen columns, of sixteen keys, against all units; keys: `place_of_key`."""
        if even_steps or part * steps + k < all_steps:
            a0, a1, a2, a3 = ptx.ldmatrix4(keys + k * 32 ^ (lane & 7) << 4)
            for n in range(units):
                z = 2 * (n * steps + k)
                multiply(score, 4 * n, a0, a1, a2, a3, query[z], query[z + 1])

    @cuda.jit(device=True, inline="always")
    def put_scores(score, scores, lane, half, part):
        to = scores + part * quarter + (lane & 3) * (2 * SCORE_ROW)
        to = to + half * 64 + (lane >> 2) * 4
        for n in range(units):
            for z in range(4):
                ptx.sts1_f(to + n * UNIT + (z & 1) * SCORE_ROW + (z >> 1) * 32, score[4 * n + z])

    @cuda.jit(device=True, inline="always")
    def key_of(lane):
        """The key that a lane weighs: the order in which lanes' totals are added."""
        return (lane & 16) + ((lane & 15) >> 1) + (lane & 1) * 8

    @cuda.jit(device=True, inline="always")
    def greatest(x):
        """The warp's, as integers in order; a NaN, whose weight is one, is above all."""
        bits = ptx.as_bits(x)
        order = ptx.redux_max(bits ^ (uint32(int32(bits) >> 31) | 0x80000000))
        return ptx.as_float(order ^ (uint32(int32(order ^ 0xFFFFFFFF) >> 31) | 0x80000000))

    @cuda.jit(device=True, inline="always")
    def weigh(shared, scores, lane, warp, position, last, scale, top, total):
        """Weights of the lane's key, at `position`, for head `warp` of each unit.

        Returns whether a top moved, so that the sums must decay.
        """
        x, high = cuda.local.array(units, float32), cuda.local.array(units, float32)
        key = key_of(lane)
        for n in range(units):
            here = scores + warp * SCORE_ROW + n * UNIT + key * 4
            s = ptx.add(ptx.lds1_f(here), ptx.lds1_f(here + quarter))
            s = ptx.add(s, ptx.lds1_f(here + 2 * quarter))
            s = ptx.mul(ptx.add(s, ptx.lds1_f(here + 3 * quarter)), scale)
            if position > last:
                s = LOWEST
            x[n], high[n] = s, greatest(s)
        if not deep:
            cuda.syncwarp()  # weights take the place of scores that all lanes have read
        moved = int32(0)
        for n in range(units):
            new = top[n]
            if high[n] > ptx.add(new, GROWTH):
                new, moved = high[n], int32(1)
            decay = ptx.exp2(ptx.sub(top[n], new))
            top[n] = new
            weight = ptx.exp2(ptx.sub(x[n], new))
            total[n] = ptx.fma(total[n], decay, weight)
            to = shared + weights_at + n * weight_unit + warp * weight_row
            ptx.sts1_h(to + 2 * key, ptx.round_bf16(weight))
            if lane == 0:
                ptx.sts1_f(shared + decays_at + n * 32 + warp * 4, decay)
        return moved

    @cuda.jit(device=True, inline="always")
    def decay_sums(acc, shared, lane):
        for n in range(units):
            f0, f1 = ptx.lds2_f(shared + decays_at + (lane & 3) * 8 + n * 32)
            for j in range(each):
                z = 4 * (each * n + j)
                acc[z], acc[z + 1] = ptx.mul(acc[z], f0), ptx.mul(acc[z + 1], f1)
                acc[z + 2], acc[z + 3] = ptx.mul(acc[z + 2], f0), ptx.mul(acc[z + 3], f1)

    @cuda.jit(device=True, inline="always")
    def add_values(acc, shared, tile, lane, warp):
        """acc += values of the 32 keys of `tile` times their weights."""
        if even_tiles or warp * each < tiles:
            weight = cuda.local.array(weight_words, uint32)
            at = shared + weights_at + (lane & 7) * weight_row + (lane >> 3) * 16
            for n in range(units):
                w = 4 * n
                weight[w], weight[w + 1], weight[w + 2], weight[w + 3] = ptx.ldmatrix4(
                    at + n * weight_unit
                )
            column = warp * (each * 32) + (lane >> 3 & 1) * 16
            at = tile + ((lane >> 4) * 8 + (lane & 7)) * row + (column ^ (lane & 7) << 4)
            for h in range(2):
                for j in range(each):
                    a0, a1, a2, a3 = ptx.ldmatrix4_t((at ^ j * 32) + h * (16 * row))
                    for n in range(units):
                        w, z = 4 * n + 2 * h, 4 * (each * n + j)
                        multiply(acc, z, a0, a1, a2, a3, weight[w], weight[w + 1])

    @cuda.jit(device=True, inline="always")
    def store(acc, top, total, partial, tops, place, many, lane, warp):
        """The piece's sums, and of each head the maximum and the total, for `many` units."""
        for e in range(5):
            for n in range(units):
                total[n] = ptx.add(total[n], ptx.shfl_xor_f(total[n], 1 << e))
        for n in range(units):
            if n < many:
                if lane == 0:
                    tops[2 * ((place + n) * 8 + warp)] = top[n]
                    tops[2 * ((place + n) * 8 + warp) + 1] = total[n]
                if even_tiles or warp * each < tiles:
                    to = ptx.at(partial, (((place + n) * tiles + warp * each) * 32 + lane) * 4)
                    for j in range(each):
                        z = 4 * (each * n + j)
                        ptx.stg4_f(to, j * 128, acc[z], acc[z + 1], acc[z + 2], acc[z + 3])

    return SimpleNamespace(
        copy_queries=copy_queries,
        load_queries=load_queries,
        place_of_key=place_of_key,
        score_step=score_step,
        put_scores=put_scores,
        key_of=key_of,
        weigh=weigh,
        decay_sums=decay_sums,
        add_values=add_values,
        store=store,
    )
