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
from ddtree_numba.kernels.attention_keys import make_keys
from ddtree_numba.kernels.attention_splits import CHUNK
from ddtree_numba.kernels.attention_steps import make_steps
from ddtree_numba.kernels.attention_tiles import (
    LOWEST,
    SHALLOW,
    THREADS,
    WINDOW,
    Batch,
    Layout,
    first_of,
    item_after,
    owner_of,
    same_owner,
    span_of,
)
from ddtree_numba.kernels.launch import Kernel, kernel


@cache
def make(width: int, latent: int, units: int) -> Kernel:
    """Partials of pieces of up to `units` units."""
    layout = Layout(width, latent, units, SHALLOW)
    do, of = make_steps(layout, width, units), make_keys(layout, width)
    put_record, entry_at, key_at, copy = of.put_record, of.entry_at, of.key_at, of.copy
    copy_queries, load_queries = do.copy_queries, do.load_queries
    place_of_key, score_step, put_scores = do.place_of_key, do.score_step, do.put_scores
    key_of, weigh, decay_sums = do.key_of, do.weigh, do.decay_sums
    add_values, store = do.add_values, do.store
    row, tile_bytes, list_in = layout.row, layout.tile, layout.list
    scores_at = layout.scores
    steps, copies = layout.steps, layout.copies
    early = copies if steps < 6 else (copies + 1) // 2  # copies behind the first steps of scores
    query_words, score_words = 2 * units * steps, 4 * units
    sums = layout.each * units * 4
    first_copies, second_copies = (2, 5) if steps >= 6 else (0, steps)

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
        batch = Batch(pages, scratch, page_table, paths)
        shared = int32(ptx.shared_address(cuda.shared.array(0, int32, alignment=128)))
        list_at = int32(shared + list_in)
        tid = int32(cuda.threadIdx.x)
        lane, warp = int32(tid & 31), int32(tid >> 5)
        half, part = int32(warp & 1), int32(warp >> 1)
        row_of, piece = int32(tid >> 3), int32(tid & 7)
        to = int32(shared + row_of * row + ((piece ^ row_of & 7) << 4))
        keys = int32(place_of_key(shared, lane, half, part))
        query = cuda.local.array(query_words, uint32)
        score = cuda.local.array(score_words, float32)
        acc = cuda.local.array(sums, float32)
        top = cuda.local.array(units, float32)
        total = cuda.local.array(units, float32)
        # What the plan and earlier rounds wrote is there: `plan_ends`, or a kernel of the layer
        # before, has waited for it.
        begin, behind = int32(ranges[cuda.blockIdx.x]), int32(ranges[cuda.blockIdx.x + 1])
        while begin < behind:
            end = min(int32(behind - begin), int32(WINDOW))
            if tid < end:
                put_record(list_at, tid, items, begin + tid, nodes, parts, depths, table_width)
            cuda.syncthreads()
            p = first_of(list_at, 0) + row_of
            entry, place = entry_at(batch, list_at, 0, p)
            key = key_at(batch, entry, place, piece)
            if place >= 0:
                copy(to, key, piece, 0, copies)
            ptx.wait_for_previous()
            ptx.launch_next()
            if place < 0:
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
                        entry, place = entry_at(batch, list_at, ahead, there + row_of)
                        key = key_at(batch, entry, place, piece)
                    for z in range(score_words):
                        score[z] = float32(0)
                    other = int32(to + tile_bytes - tile)
                    for k in range(steps):
                        score_step(query, score, keys + tile, lane, k, part)
                        if more and k == first_copies:
                            copy(other, key, piece, 0, early)
                        if more and k == second_copies:
                            copy(other, key, piece, early, copies)
                    ptx.copy_commit()
                    put_scores(score, shared + scores_at, lane, half, part)
                    cuda.syncthreads()
                    last, position = span_of(list_at, i).last, p - CHUNK + key_of(lane)
                    moved = weigh(
                        shared, shared + scores_at, lane, warp, position, last, scale, top, total
                    )
                    if cuda.syncthreads_or(moved):
                        decay_sums(acc, shared, lane)
                    add_values(acc, shared, shared + tile, lane, warp)
                    tile = int32(tile_bytes - tile)
                owner = owner_of(list_at, i)
                at = owner.request * splits + span_of(list_at, i).split
                at = at * (nodes * parts) + owner.unit
                store(acc, top, total, partial, tops, at, owner.units, lane, warp)
                i = int32(i + 1)
            begin = item_after(list_at, int32(end - 1))
            cuda.syncthreads()
            behind = int32(ranges[cuda.blockIdx.x + 1])  # again: registers are full
        ptx.wait_for_previous()  # blocks without pieces too: the grid ends after the one before

    return partial_kernel
