"""The partials of tree attention, of a unit that has the block to itself: copies far ahead.

The steps are those of `attention_steps.py`, and so are all bits. Here a block has a ring of tiles,
and makes the weights of a chunk c beside the scores of the next one, half of its warps in one
order, half in the other:

    weights of c, scores of c + 1; copies of chunk c + ring - 1 to the tile of c - 1
    barrier
    values of c
    barrier: tile c is free, chunk c + 2 is here
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
    THREADS,
    WARPS,
    WINDOW,
    Batch,
    Layout,
    first_of,
    item_after,
    owner_of,
    same_owner,
    span_of,
)
from ddtree_numba.kernels.compile import MAX_SHARED
from ddtree_numba.kernels.launch import Kernel, kernel


@cache
def make(width: int, latent: int, units: int, ring: int) -> Kernel:
    """Partials of pieces of up to `units` units; ring: tiles, four at least."""
    layout = Layout(width, latent, units, ring)
    do, of = make_steps(layout, width, units), make_keys(layout, width)
    copy_queries, load_queries = do.copy_queries, do.load_queries
    place_of_key, score_step, put_scores = do.place_of_key, do.score_step, do.put_scores
    key_of, weigh, decay_sums = do.key_of, do.weigh, do.decay_sums
    add_values, store = do.add_values, do.store
    put_record, entry_at, key_at = of.put_record, of.entry_at, of.key_at
    copy, chunk_after = of.copy, of.chunk_after
    row, tile_bytes, last_tile = layout.row, layout.tile, layout.last
    scores_at, set_bytes = layout.scores, layout.set
    list_in, steps, copies = layout.list, layout.steps, layout.copies
    query_words, score_words = 2 * units * steps, 4 * units
    sums, spread = layout.each * units * 4, -(-layout.copies // layout.steps)

    @kernel(
        threads=THREADS,
        name=f"tree_attention_{width}_{latent}_{units}_{ring}",
        shared_bytes=layout.bytes,
        registers=255,
        opcodes=("HMMA", "LDSM", "LDGSTS"),
        pdl=True,
        large=layout.bytes > MAX_SHARED,
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
            ahead, there = int32(0), first_of(list_at, 0)  # the chunk to be copied next
            entry, place = entry_at(batch, list_at, 0, there + row_of)
            key = key_at(batch, entry, place, piece)
            if place >= 0:
                copy(to, key, piece, 0, copies)
            ptx.wait_for_previous()
            ptx.launch_next()
            if place < 0:
                copy(to, key, piece, 0, copies)
            i, tile, flip = int32(0), int32(0), int32(0)
            while i < end:
                if i == 0 or not same_owner(list_at, i):
                    owner = owner_of(list_at, i)
                    spare = int32(shared + (tile - tile_bytes if tile > 0 else last_tile))
                    copy_queries(q, shared, spare, owner, nodes, parts, heads, tid)
                    ptx.copy_commit()
                    if i == 0:
                        for n in range(1, ring - 1):
                            ahead, there = chunk_after(list_at, ahead, there, end)
                            if ahead < end:
                                entry, place = entry_at(batch, list_at, ahead, there + row_of)
                                key = key_at(batch, entry, place, piece)
                                copy(to + n * tile_bytes, key, piece, 0, copies)
                            ptx.copy_commit()
                        ahead, there = chunk_after(list_at, ahead, there, end)
                        entry, place = entry_at(
                            batch, list_at, min(ahead, int32(end - 1)), there + row_of
                        )
                        key = key_at(batch, entry, place, piece)
                        ptx.copy_wait(ring - 2)
                    else:
                        ptx.copy_wait(0)
                    cuda.syncthreads()
                    load_queries(query, shared, spare, lane, part)
                    cuda.syncthreads()  # keys and scores take the place of queries
                    for z in range(score_words):
                        score[z] = float32(0)
                    for k in range(steps):
                        score_step(query, score, keys + tile, lane, k, part)
                    put_scores(score, shared + scores_at + flip, lane, half, part)
                    ptx.copy_wait(ring - 3)
                    cuda.syncthreads()
                p = first_of(list_at, i)
                left = span_of(list_at, i).chunks
                for z in range(sums):
                    acc[z] = float32(0)
                for n in range(units):
                    top[n] = LOWEST
                    total[n] = float32(0)
                while left > 0:
                    left = int32(left - 1)
                    next_tile = int32(tile + tile_bytes) if tile < last_tile else int32(0)
                    free = int32(to + (tile - tile_bytes if tile > 0 else last_tile))
                    more = ahead < end
                    here, other = shared + scores_at + flip, shared + scores_at + set_bytes - flip
                    last, position = span_of(list_at, i).last, p + key_of(lane)
                    moved = int32(0)
                    if warp < WARPS // 2:
                        moved = weigh(shared, here, lane, warp, position, last, scale, top, total)
                    if left > 0 or (i + 1 < end and same_owner(list_at, i + 1)):
                        for z in range(score_words):
                            score[z] = float32(0)
                        for k in range(steps):
                            score_step(query, score, keys + next_tile, lane, k, part)
                            if more:
                                copy(free, key, piece, k * spread, min(k * spread + spread, copies))
                        put_scores(score, other, lane, half, part)
                    elif more:
                        copy(free, key, piece, 0, copies)
                    ptx.copy_commit()
                    if warp >= WARPS // 2:
                        moved = weigh(shared, here, lane, warp, position, last, scale, top, total)
                    if cuda.syncthreads_or(moved):
                        decay_sums(acc, shared, lane)
                    ahead, there = chunk_after(list_at, ahead, there, end)
                    entry, place = entry_at(
                        batch, list_at, min(ahead, int32(end - 1)), there + row_of
                    )
                    add_values(acc, shared, shared + tile, lane, warp)
                    key = key_at(batch, entry, place, piece)
                    ptx.copy_wait(ring - 3)
                    cuda.syncthreads()
                    tile, flip, p = next_tile, int32(set_bytes - flip), int32(p + CHUNK)
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
