"""The partials of tree attention: blocks that stay, each with its pieces of the plan.

A chunk of 32 keys passes a block in three steps with a barrier behind each (`attention_steps.py`).
Keys come by asynchronous copies a chunk ahead, across the end of a piece into the next; queries are
kept while the next piece has the same units. A key comes from its page, or from scratch along the
unit's own path.
"""

from functools import cache

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.attention_plan import ITEM
from ddtree_numba.kernels.attention_splits import CHUNK, PAGE
from ddtree_numba.kernels.attention_steps import make_steps
from ddtree_numba.kernels.attention_tiles import (
    LOWEST,
    THREADS,
    WINDOW,
    Batch,
    Layout,
    first_of,
    owner_of,
    same_owner,
    span_of,
)
from ddtree_numba.kernels.launch import Kernel, kernel


@cache
def make(width: int, latent: int, units: int) -> Kernel:
    """Partials of pieces of up to `units` units."""
    layout = Layout(width, latent, units)
    do = make_steps(layout, width, units)
    copy_queries, load_queries = do.copy_queries, do.load_queries
    score_step, put_scores = do.score_step, do.put_scores
    key_of, weigh, add_values, store = do.key_of, do.weigh, do.add_values, do.store
    row, tile_bytes, list_in = layout.row, layout.tile, layout.list
    steps, copies, pieces = layout.steps, layout.copies, layout.pieces
    early = copies if steps < 6 else (copies + 1) // 2  # copies behind the first steps of scores
    query_words, score_words = 2 * units * steps, 4 * units
    sums = layout.each * units * 4
    first_copies, second_copies = (2, 5) if steps >= 6 else (0, steps)

    @cuda.jit(device=True, inline="always")
    def key_at(batch, list_at, i, p, piece):
        """Sixteen bytes of the key at p for piece i of the list, and whether they lie in a page.

        Behind the last position that the piece sees, it is that one's.
        """
        owner, span = owner_of(list_at, i), span_of(list_at, i)
        p = min(p, span.last)
        over = int32(p - span.start)
        if over < 0:
            page = int32(batch.page_table[owner.request * batch.table_width + (p >> 6)])
            key = ptx.at(batch.pages, (page * PAGE + (p & (PAGE - 1))) * width)
        else:
            first = owner.request * batch.nodes
            node = first + ptx.divide(owner.unit, batch.parts)
            node = first + batch.paths[node * batch.depths + over]
            key = ptx.at(batch.scratch, node * width)
        return ptx.at(key, piece * 8), over < 0

    @cuda.jit(device=True, inline="always")
    def copy(to, key, piece, begin, end):
        """16-byte pieces number `piece` + 8 n of a key, for n from begin to end - 1."""
        for n in range(begin, end):
            if 8 * n + 8 <= pieces or piece + 8 * n < pieces:
                ptx.copy16(to + n * 128, key, n * 64)

    @kernel(
        threads=THREADS,
        name=f"tree_attention_{width}_{latent}_{units}",
        min_blocks=2 if units == 1 else 1,
        shared_bytes=layout.bytes,
        registers=128 if units == 1 else 255,
        opcodes=("HMMA", "LDSM", "LDGSTS"),
        pdl=True,
    )
    @cuda.jit
    def partial_kernel(
        q: read(bf16),
        pages: read(bf16),
        scratch: read(bf16),
        page_table: read(int32),
        paths: read(int32),
        items: read(int32),
        ranges: read(int32),
        tops: write(float32),
        partial: write(float32),
        scale: float32,
        nodes: int32,
        heads: int32,
        parts: int32,
        depths: int32,
        table_width: int32,
        splits: int32,
    ):
        batch = Batch(pages, scratch, page_table, paths, nodes, parts, depths, table_width)
        shared = int32(ptx.shared_address(cuda.shared.array(0, int32, alignment=16)))
        list_at = int32(shared + list_in)
        tid = int32(cuda.threadIdx.x)
        lane, warp = int32(tid & 31), int32(tid >> 5)
        half, part = int32(warp & 1), int32(warp >> 1)
        row_of, piece = int32(tid >> 3), int32(tid & 7)
        to = int32(shared + row_of * row + piece * 16)
        keys = int32(
            shared + (half * 16 + (lane & 15)) * row + (lane >> 4) * 16 + part * steps * 32
        )
        query = cuda.local.array(query_words, uint32)
        score = cuda.local.array(score_words, float32)
        acc = cuda.local.array(sums, float32)
        top = cuda.local.array(units, float32)
        total = cuda.local.array(units, float32)
        x = cuda.local.array(units, float32)
        high = cuda.local.array(units, float32)
        # What the plan and earlier rounds wrote is older than the launch before: no wait for it.
        begin, behind = int32(ranges[cuda.blockIdx.x]), int32(ranges[cuda.blockIdx.x + 1])
        while begin < behind:
            end = min(int32(behind - begin), int32(WINDOW))
            k = tid
            while k < end * ITEM:
                ptx.sts1(list_at + 4 * k, items[begin * ITEM + k])
                k += THREADS
            cuda.syncthreads()
            p = first_of(list_at, 0) + row_of
            key, committed = key_at(batch, list_at, 0, p, piece)
            if committed:
                copy(to, key, piece, 0, copies)
            ptx.wait_for_previous()
            ptx.launch_next()
            if not committed:
                copy(to, key, piece, 0, copies)
            i, tile = int32(0), int32(0)
            while i < end:
                if i == 0 or not same_owner(list_at, i):
                    owner = owner_of(list_at, i)
                    cuda.syncthreads()  # nobody reads the other tile or weights any more
                    spare = shared + tile_bytes - tile
                    copy_queries(q, shared, spare, owner, nodes, parts, heads, tid)
                    ptx.copy_commit()
                    ptx.copy_wait(0)
                    cuda.syncthreads()
                    load_queries(query, shared, spare, lane, part)
                p = first_of(list_at, i)
                left = span_of(list_at, i).chunks
                for z in range(sums):
                    acc[z] = float32(0)
                for n in range(units):
                    top[n] = LOWEST
                    total[n] = float32(0)
                while left > 0:
                    left = int32(left - 1)
                    p = int32(p + CHUNK)
                    ptx.copy_wait(0)
                    cuda.syncthreads()  # the tile is here; the other one and weights are free
                    ahead, there = i, p  # the chunk to be copied meanwhile
                    if left == 0:
                        ahead = int32(i + 1)
                    more = ahead < end
                    if more:
                        if left == 0:
                            there = first_of(list_at, ahead)
                        key, _ = key_at(batch, list_at, ahead, there + row_of, piece)
                    for z in range(score_words):
                        score[z] = float32(0)
                    other = int32(to + tile_bytes - tile)
                    for k in range(steps):
                        score_step(query, score, keys + tile, k, part)
                        if more and k == first_copies:
                            copy(other, key, piece, 0, early)
                        if more and k == second_copies:
                            copy(other, key, piece, early, copies)
                    ptx.copy_commit()
                    put_scores(score, shared, lane, half, part)
                    cuda.syncthreads()
                    last, position = span_of(list_at, i).last, p - CHUNK + key_of(lane)
                    weigh(shared, lane, warp, position, last, scale, x, high, top, total)
                    cuda.syncthreads()
                    add_values(acc, shared, shared + tile, lane, warp)
                    tile = int32(tile_bytes - tile)
                owner = owner_of(list_at, i)
                place = owner.request * splits + span_of(list_at, i).split
                place = place * (nodes * parts) + owner.unit
                store(acc, top, total, partial, tops, place, owner.units, lane, warp)
                i = int32(i + 1)
            cuda.syncthreads()
            begin = int32(begin + end)
            behind = int32(ranges[cuda.blockIdx.x + 1])  # again: registers are full
        ptx.wait_for_previous()  # blocks without pieces too: the grid ends after the one before

    return partial_kernel
