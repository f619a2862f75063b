"""What one warp of `draft_attention_split.py` does with its keys: scores, running softmax, values.

The warp has 16 query rows. Its lane 4 g + t holds, of every eight columns of a product, columns 2 t
and 2 t + 1 of rows g and g + 8: half h = 0, 1 below. That is also where the next product wants its
operand, so weights never leave the registers (FlashAttention-2, arXiv 2307.08691).

Columns of a head are counted in another order, alike for queries and keys: of each 32 a lane has
8 t .. 8 t + 7, 16 bytes at once. In shared memory pieces of 16 bytes are exchanged, by the row, so
that rows which one access takes together lie in different banks.
"""

from types import SimpleNamespace

import numpy as np
from numba import cuda, float32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.tensor_cores import multiply

PAGE = 64  # positions
LOWEST = np.float32(-3e38)  # a maximum over nothing: finite, so that LOWEST - LOWEST is no NaN
HIDDEN = np.float32(-np.inf)  # score of what a row does not see: its weight is an exact zero
SLACK = np.float32(8)  # log2 by which scores may outgrow the maximum before the sums are rescaled


def make_steps(width: int, tiles: int, keys: int) -> SimpleNamespace:
    """The steps for heads of `width` columns, 16 * tiles query rows, `keys` positions at a time."""
    parts, columns, eights, groups = width // 32, width // 8, keys // 8, PAGE // keys
    row_bytes, key_bytes = width * 2, keys * width * 2
    flip = 4 if width > 32 else 0  # a key's neighbours use the other half of the banks
    fold, mask = (0, 7) if width > 32 else (1, 3)  # eight rows of values use all of them

    @cuda.jit(device=True, inline="always")
    def key_place(row, piece):
        """Byte of a key's piece among the keys and values of one step."""
        return row * row_bytes + (piece ^ (row & 1) * flip) * 16

    @cuda.jit(device=True, inline="always")
    def value_place(row, piece):
        return key_bytes + row * row_bytes + (piece ^ (row >> fold & mask)) * 16

    @cuda.jit(device=True, inline="always")
    def load_query(q, at, query, h):
        """Row h of a lane: at is its first column."""
        for b in range(parts):
            z = 8 * b + 4 * h
            query[z], query[z + 1], query[z + 2], query[z + 3] = ptx.ldg4(q, at + 32 * b)

    @cuda.jit(device=True, inline="always")
    def find_scores(query, stage, lane, score):
        """score[4 n + 2 h + e]: row h, key 8 n + 2 t + e; not scaled yet."""
        for i in range(4 * eights):
            score[i] = float32(0)
        for b in range(parts):
            at = stage + key_place(lane >> 2, 4 * b + (lane & 3))
            q0, q1, q2, q3 = query[8 * b], query[8 * b + 1], query[8 * b + 2], query[8 * b + 3]
            r0, r1, r2, r3 = query[8 * b + 4], query[8 * b + 5], query[8 * b + 6], query[8 * b + 7]
            for n in range(eights):
                k0, k1, k2, k3 = ptx.lds4(at + n * 8 * row_bytes)
                multiply(score, 4 * n, q0, r0, q1, r1, k0, k1)
                multiply(score, 4 * n, q2, r2, q3, r3, k2, k3)

    @cuda.jit(device=True, inline="always")
    def hide(score, first, own, limit, causal, window):
        """Take away what row h, at position own[h], does not see; first: position of score[0]."""
        for h in range(2):
            for i in range(2 * eights):
                n, e = i >> 1, i & 1
                position = first + 8 * n + e
                age = own[h] - position
                if position >= limit or age >= window or (causal and age < 0):
                    score[4 * n + 2 * h + e] = HIDDEN

    @cuda.jit(device=True, inline="always")
    def highest(score, h, scale):
        high = score[2 * h]
        for n in range(eights):
            high = ptx.fmax(high, ptx.fmax(score[4 * n + 2 * h], score[4 * n + 2 * h + 1]))
        high = ptx.fmax(high, ptx.shfl_xor_f(high, 1))
        return ptx.mul(ptx.fmax(high, ptx.shfl_xor_f(high, 2)), scale)

    @cuda.jit(device=True, inline="always")
    def weigh(score, scale, weight, top, total, acc):
        """Weights of the keys in bfloat16; what was summed before is rescaled where it must be."""
        high0, high1 = highest(score, 0, scale), highest(score, 1, scale)
        if high0 > ptx.add(top[0], SLACK) or high1 > ptx.add(top[1], SLACK):  # rare
            for h in range(2):
                high = ptx.fmax(top[h], high1 if h else high0)
                decay = ptx.exp2(ptx.sub(top[h], high))
                top[h], total[h] = high, ptx.mul(total[h], decay)
                for n in range(columns):
                    for e in range(2):
                        acc[4 * n + 2 * h + e] = ptx.mul(acc[4 * n + 2 * h + e], decay)
        for n in range(eights):
            for h in range(2):
                z = 4 * n + 2 * h
                low = ptx.exp2(ptx.fma(score[z], scale, -top[h]))
                high = ptx.exp2(ptx.fma(score[z + 1], scale, -top[h]))
                total[h] = ptx.add(total[h], ptx.add(low, high))
                weight[2 * n + h] = ptx.pack_bf16(high, low)

    @cuda.jit(device=True, inline="always")
    def add_values(weight, stage, lane, acc):
        """acc[4 n + 2 h + e] += weights of row h times column 8 n + 2 t + e of the values."""
        for k in range(keys // 16):
            w0, w1, w2, w3 = weight[4 * k], weight[4 * k + 1], weight[4 * k + 2], weight[4 * k + 3]
            for n in range(0, columns, 2):
                at = stage + value_place(lane & 15, n + (lane >> 4)) + k * 16 * row_bytes
                v0, v1, v2, v3 = ptx.ldmatrix4_t(at)
                multiply(acc, 4 * n, w0, w1, w2, w3, v0, v1)
                multiply(acc, 4 * n + 4, w0, w1, w2, w3, v2, v3)

    @cuda.jit(device=True, inline="always")
    def meet(shared, tile, group, lane, top, total, acc):
        """Of the warps that share rows, the sums in the order of their keys, into group 0."""
        mine = shared + (tile * 32 + lane) * 16
        marks = mine + (groups - 1) * columns * tiles * 512
        cuda.syncthreads()  # the shared memory is free
        if group > 0:
            for n in range(columns):
                at, z = mine + ((group - 1) * columns + n) * tiles * 512, 4 * n
                ptx.sts4_f(at, acc[z], acc[z + 1], acc[z + 2], acc[z + 3])
            at = marks + (group - 1) * tiles * 512
            ptx.sts4_f(at, top[0], total[0], top[1], total[1])
        cuda.syncthreads()
        if group == 0:
            other = cuda.local.array(4, float32)
            factor = cuda.local.array(4, float32)  # of a row's sums so far, and of the other's
            for p in range(groups - 1):
                at = marks + p * tiles * 512
                other[0], other[1], other[2], other[3] = ptx.lds4_f(at)
                for h in range(2):
                    high = ptx.fmax(top[h], other[2 * h])
                    factor[2 * h] = ptx.exp2(ptx.sub(top[h], high))
                    factor[2 * h + 1] = ptx.exp2(ptx.sub(other[2 * h], high))
                    total[h] = ptx.mul(total[h], factor[2 * h])
                    total[h] = ptx.fma(other[2 * h + 1], factor[2 * h + 1], total[h])
                    top[h] = high
                for n in range(columns):
                    at = mine + (p * columns + n) * tiles * 512
                    other[0], other[1], other[2], other[3] = ptx.lds4_f(at)
                    for i in range(4):
                        z, h = 4 * n + i, i >> 1
                        acc[z] = ptx.mul(acc[z], factor[2 * h])
                        acc[z] = ptx.fma(other[i], factor[2 * h + 1], acc[z])

    return SimpleNamespace(
        key_place=key_place,
        value_place=value_place,
        load_query=load_query,
        find_scores=find_scores,
        hide=hide,
        weigh=weigh,
        add_values=add_values,
        meet=meet,
    )
