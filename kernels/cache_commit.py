"""Accepted rows into their pages on the device; see `spec/cache_commit.py`.

A block copies row j of one request in a few layers, 16 bytes a thread at a time. The tree's rows
and the pages are buffers of their own, so the order of copies does not matter. What the
specification refuses cannot be raised here: a row without a page of its own or a node outside of
the scratch is left out.
"""

import math
from functools import cache

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, update
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.pieces import BYTES, WORDS, load16, store16, strides_of

THREADS = 96  # 72 pieces of 16 bytes are a row of K2.6
LAYERS = 4  # of a thread: four loads under way behind one chain of indices


@cuda.jit(device=True, inline="always")
def element_at(layer, layer_stride, group, group_stride, row, row_stride):
    """Offset of a row's first element: 64 bits, for caches have more than 2**31 elements."""
    return layer * layer_stride + group * group_stride + row * row_stride


@cache
def make(element, page_size: int) -> Kernel:
    piece, count = BYTES // read(element).dtype.itemsize, WORDS * LAYERS

    @kernel(
        threads=THREADS,
        name=f"cache_commit_{element}_{page_size}",
        registers=64,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def cache_commit_kernel(
        pages: update(element),
        scratch: read(element),
        page_table: read(int32),
        starts: read(int32),
        nodes: read(int32),
        counts: read(int32),
        layers: int32,
        pool: int32,
        page_layer: int64,
        width: int64,
        scratch_layer: int64,
        scratch_request: int64,
        scratch_node: int64,
        tree: int32,
        table_width: int32,
        path_width: int32,
    ):
        j, request, first = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z * LAYERS
        words = cuda.local.array(count, uint32)
        ptx.launch_next()
        ptx.wait_for_previous()
        if j < counts[request]:
            position = starts[request] + j
            node = nodes[request * path_width + j]
            index, page = position // page_size, int32(-1)
            if position >= 0 and index < table_width:
                page = page_table[request * table_width + index]
            if page >= 0 and page < pool and node >= 0 and node < tree:
                slot = position - index * page_size
                column = cuda.threadIdx.x * piece
                while column < width:
                    for n in range(LAYERS):
                        if first + n < layers:
                            source = element_at(
                                first + n,
                                scratch_layer,
                                request,
                                scratch_request,
                                node,
                                scratch_node,
                            )
                            load16(scratch, source + column, words, WORDS * n)
                    for n in range(LAYERS):
                        if first + n < layers:
                            target = element_at(
                                first + n, page_layer, page, page_size * width, slot, width
                            )
                            store16(pages, target + column, words, WORDS * n)
                    column += THREADS * piece

    return cache_commit_kernel


def cache_commit(pages, scratch, page_table, starts, nodes, counts, *, stream=None) -> None:
    """Copy the accepted rows into their pages, in place. The scratch may be a view with gaps."""
    layers, pool, page_size = pages.shape[:3]
    requests, tree = scratch.shape[1:3]
    width = math.prod(pages.shape[3:])
    require("pages", pages, pages.shape)
    require("page_table", page_table, (requests, page_table.shape[-1]), "int32")
    require("starts", starts, (requests,), "int32")
    require("nodes", nodes, (requests, nodes.shape[-1]), "int32")
    require("counts", counts, (requests,), "int32")
    if scratch.shape[0] != layers or scratch.shape[3:] != pages.shape[3:]:
        raise ValueError(f"scratch: shape {scratch.shape} does not fit pages {pages.shape}")
    if scratch.dtype != pages.dtype:
        raise ValueError(f"scratch: dtype {scratch.dtype}, expected {pages.dtype}")
    strides_of("pages", pages, 3, BYTES // pages.itemsize)
    strides = strides_of("scratch", scratch, 3, BYTES // pages.itemsize)
    body = make(element_of("pages", pages), page_size)
    body.launch(
        (nodes.shape[1], requests, -(-layers // LAYERS)),
        pages,
        scratch,
        page_table,
        starts,
        nodes,
        counts,
        layers,
        pool,
        pool * page_size * width,
        width,
        *strides,
        tree,
        page_table.shape[1],
        nodes.shape[1],
        stream=stream,
    )


def instances() -> list[Kernel]:
    return [make(bf16, 64), make(float32, 64)]
