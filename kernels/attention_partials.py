"""The partials of tree attention: blocks that stay, each with its pieces of the plan.

Eight warps copy keys and add values, four make weights of scores; each role walks the block's items
on its own (`attention_scores.py`, `attention_values.py`), with queries kept from piece to piece.
"""

from functools import cache

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.attention_plan import ITEM
from ddtree_numba.kernels.attention_scores import make_scorer
from ddtree_numba.kernels.attention_tiles import (
    ADDING,
    THREADS,
    WINDOW,
    Layout,
    place_of,
    same_units,
    span_of,
)
from ddtree_numba.kernels.attention_values import make_adder
from ddtree_numba.kernels.launch import Kernel, kernel


@cache
def make(width: int, latent: int, units: int) -> Kernel:
    """Partials of all pieces; units 1 is a kernel of tails alone."""
    alone, layout = Layout(width, latent, 1, units), Layout(width, latent, units, units)
    load_tail, score_tail = make_scorer(alone, True)
    load_shared, score_shared = make_scorer(layout, False)
    add_tails, add_shared = make_adder(alone, True), make_adder(layout, False)
    words_tail = 2 * alone.slice_steps
    words_shared = words_tail * ((units + 1) // 2)
    here_at, list_at = layout.here, layout.list

    @kernel(
        threads=THREADS,
        name=f"tree_attention_{width}_{latent}_{units}",
        shared_bytes=layout.bytes,
        registers=168,
        opcodes=("HMMA", "LDSM", "LDGSTS"),
        pdl=True,
    )
    @cuda.jit
    def partial_kernel(
        q: read(bf16),
        pages: read(bf16),
        scratch: read(bf16),
        page_table: read(int32),
        starts: read(int32),
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
        # through a lane: else sm_90 asks for the block's place in its cluster at every use
        shared = int32(ptx.shfl_idx(ptx.shared_address(cuda.shared.array(0, int32)), 0))
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(shared + here_at, ADDING)
            ptx.mbarrier_init(shared + here_at + 8, ADDING)
        ptx.wait_for_previous()
        ptx.launch_next()
        begin, behind = int32(ranges[cuda.blockIdx.x]), int32(ranges[cuda.blockIdx.x + 1])
        turn = int32(0)  # chunks that the block has done
        pieces = int32(shared + list_at)
        while begin < behind:
            end = min(int32(behind - begin), int32(WINDOW))
            k = int32(cuda.threadIdx.x)
            while k < end * ITEM:
                ptx.sts1(pieces + 4 * k, items[begin * ITEM + k])
                k += THREADS
            cuda.syncthreads()
            i = int32(0)
            if cuda.threadIdx.x < ADDING:
                while i < end:
                    if units > 1:
                        _, _, _, _, _, tail = span_of(pieces, i)
                        if tail == 0:
                            i, turn = add_shared(
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
                            )
                    if i < end:
                        i, turn = add_tails(
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
                        )
            else:
                while i < end:
                    r, unit, first, count, last, tail = span_of(pieces, i)
                    base = r * nodes * heads
                    if tail:
                        one = cuda.local.array(words_tail, uint32)
                        load_tail(q, one, base, unit, 1, parts, heads)
                        turn = score_tail(
                            shared,
                            one,
                            turn,
                            first,
                            count,
                            last,
                            scale,
                            pieces,
                            i,
                            tops,
                            splits,
                            nodes * parts,
                        )
                        i += 1
                    elif units > 1:
                        query = cuda.local.array(words_shared, uint32)
                        _, many = place_of(pieces, i, splits, nodes * parts)
                        load_shared(q, query, base, unit, many, parts, heads)
                        same = True
                        while same:
                            turn = score_shared(
                                shared,
                                query,
                                turn,
                                first,
                                count,
                                last,
                                scale,
                                pieces,
                                i,
                                tops,
                                splits,
                                nodes * parts,
                            )
                            i += 1
                            same = i < end and same_units(pieces, i)
                            if same:
                                _, _, _, count, _, _ = span_of(pieces, i)
            cuda.syncthreads()
            begin = int32(begin + end)

    return partial_kernel
