"""The steps that a block of tree attention takes for a chunk of keys: scores, weights, values.

    scores   S^T[16 keys, 8 heads] = K Q^T over a quarter of the width, by each of eight warps
    weights  the quarters are added in order; e = 2^(S - top), a warp a head, a lane a key
    values   O^T[latent, 8 heads] += V^T[latent, 32 keys] e^T, 64 rows of latent a warp

Keys, then latent columns, are the mma's 16 rows, eight heads of a node its 8 columns: no column
knows how many others there are. top moves only when a score outgrows it by 2^8, and then the sums
are scaled. Weights are rounded to bfloat16 for the values, not for their total. Between the steps
stand the barriers of `attention_partials.py`.
"""

from types import SimpleNamespace

from numba import cuda, float32, uint32

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
    scores_at, quarter, decays_at = layout.scores, layout.quarter, layout.decays
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
                to = place_of_query(shared, spare, r) + piece * 16
                for k in range(copies):
                    if 8 * k + 8 <= pieces or piece + 8 * k < pieces:
                        ptx.copy16_part(to + k * 128, q, at + k * 64, size)

    @cuda.jit(device=True, inline="always")
    def load_queries(query, shared, spare, lane, part):
        """The warp's quarter of all columns, as second operands."""
        for n in range(units):
            at = place_of_query(shared, spare, n * 8) + (lane & 7) * row
            at = at + (lane >> 3 & 1) * 16 + part * (steps * 32)
            for k in range(steps):
                z = 2 * (n * steps + k)
                query[z] = uint32(0)
                query[z + 1] = uint32(0)
                if even_steps or part * steps + k < all_steps:
                    query[z], query[z + 1] = ptx.ldmatrix2(at + k * 32)

    @cuda.jit(device=True, inline="always")
    def score_step(query, score, keys, k, part):
        """Sixteen columns, of sixteen keys, against all units; keys: the lane's address."""
        if even_steps or part * steps + k < all_steps:
            a0, a1, a2, a3 = ptx.ldmatrix4(keys + k * 32)
            for n in range(units):
                z = 2 * (n * steps + k)
                multiply(score, 4 * n, a0, a1, a2, a3, query[z], query[z + 1])

    @cuda.jit(device=True, inline="always")
    def put_scores(score, shared, lane, half, part):
        """Keys g and g + 8 of a half lie side by side: `key_of` is their order."""
        to = shared + scores_at + part * quarter + (lane & 3) * (2 * SCORE_ROW)
        to = to + half * 64 + (lane >> 2) * 8
        for n in range(units):
            ptx.sts2_f(to + n * UNIT, score[4 * n], score[4 * n + 2])
            ptx.sts2_f(to + n * UNIT + SCORE_ROW, score[4 * n + 1], score[4 * n + 3])

    @cuda.jit(device=True, inline="always")
    def key_of(lane):
        return (lane & 16) + ((lane & 15) >> 1) + (lane & 1) * 8

    @cuda.jit(device=True, inline="always")
    def weigh(shared, lane, warp, position, last, scale, x, high, top, total):
        """Weights of the lane's key, at `position`, for head `warp` of each unit."""
        at = shared + scores_at + warp * SCORE_ROW
        for n in range(units):
            here = at + n * UNIT + lane * 4
            s = ptx.add(ptx.lds1_f(here), ptx.lds1_f(here + quarter))
            s = ptx.add(s, ptx.lds1_f(here + 2 * quarter))
            s = ptx.mul(ptx.add(s, ptx.lds1_f(here + 3 * quarter)), scale)
            if position > last:
                s = LOWEST
            x[n] = s
            high[n] = s
        for e in range(5):  # each step for all units: latencies overlap
            for n in range(units):
                high[n] = ptx.fmax(high[n], ptx.shfl_xor_f(high[n], 1 << e))
        cuda.syncwarp()  # weights take the place of scores that all lanes have read
        for n in range(units):
            new = top[n]
            if high[n] > ptx.add(new, GROWTH):
                new = high[n]
            decay = ptx.exp2(ptx.sub(top[n], new))
            top[n] = new
            weight = ptx.exp2(ptx.sub(x[n], new))
            total[n] = ptx.fma(total[n], decay, weight)
            ptx.sts1_h(at + n * UNIT + 2 * key_of(lane), ptx.round_bf16(weight))
            if lane == 0:
                ptx.sts1_f(shared + decays_at + n * 32 + warp * 4, decay)

    @cuda.jit(device=True, inline="always")
    def add_values(acc, shared, tile, lane, warp):
        """acc += values of the 32 keys of `tile` times their weights."""
        if even_tiles or warp * each < tiles:
            decays = shared + decays_at + (lane & 3) * 8
            low = float32(1)
            for n in range(units):
                f0, f1 = ptx.lds2_f(decays + n * 32)
                low = ptx.fmin(low, ptx.fmin(f0, f1))
            if low < float32(1):  # rare
                for n in range(units):
                    f0, f1 = ptx.lds2_f(decays + n * 32)
                    for j in range(each):
                        z = 4 * (each * n + j)
                        acc[z], acc[z + 1] = ptx.mul(acc[z], f0), ptx.mul(acc[z + 1], f1)
                        acc[z + 2], acc[z + 3] = ptx.mul(acc[z + 2], f0), ptx.mul(acc[z + 3], f1)
            weight = cuda.local.array(weight_words, uint32)
            at = shared + scores_at + (lane & 7) * SCORE_ROW + (lane >> 3) * 16
            for n in range(units):
                w = 4 * n
                weight[w], weight[w + 1], weight[w + 2], weight[w + 3] = ptx.ldmatrix4(
                    at + n * UNIT
                )
            at = tile + ((lane >> 4) * 8 + (lane & 7)) * row
            at = at + (lane >> 3 & 1) * 16 + warp * (each * 32)
            for h in range(2):
                for j in range(each):
                    a0, a1, a2, a3 = ptx.ldmatrix4_t(at + h * (16 * row) + j * 32)
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
        score_step=score_step,
        put_scores=put_scores,
        key_of=key_of,
        weigh=weigh,
        add_values=add_values,
        store=store,
    )
