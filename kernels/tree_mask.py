"""Ancestor bits, paths and positions on the device; see `spec/tree_mask.py`.

A thread walks from its node to the root. As a parent comes before its child, the walk meets the
words in descending order, and stops at a parent that does not.
"""

from functools import cache

from numba import cuda, int32, uint64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel

THREADS = 128  # nodes of a block
MAX_NODES = 1024
WORD = 64


@cache
def make(words: bool, paths: bool, positions: bool) -> Kernel:
    made = "_words" * words + "_paths" * paths + "_positions" * positions

    @kernel(threads=THREADS, name=f"tree_mask{made}", registers=40, pdl=True)
    @cuda.jit
    def tree_mask_kernel(
        parents: read(int32),
        depths: read(int32),
        sizes: read(int32),
        starts: read(int32),
        word_table: write(uint64),
        path_table: write(int32),
        position_table: write(int32),
        nodes: int32,
        count: int32,
        width: int32,
    ):
        above = cuda.shared.array(MAX_NODES, int32)
        request, thread = cuda.blockIdx.x, int32(cuda.threadIdx.x)
        first = request * nodes
        ptx.wait_for_previous()
        ptx.launch_next()
        size = sizes[request]
        i = thread
        while i < size:
            above[i] = parents[first + i]
            i = int32(i + THREADS)
        cuda.syncthreads()
        i = int32(cuda.blockIdx.y * THREADS + thread)
        if i < nodes:
            node, depth = int32(-1), int32(-1)
            if i < size:
                node = i
                if paths or positions:
                    depth = depths[first + i]
            if positions:
                position_table[first + i] = starts[request] + max(depth, int32(0))
            if paths:
                row = (first + i) * width
                depth = max(min(depth, int32(width - 1)), int32(-1))
                j = int32(width - 1)
                while j > depth:
                    path_table[row + j] = -1
                    j = int32(j - 1)
            word = int32(0)
            if words:
                word = int32(count - 1)
            while word >= 0:
                bits = uint64(0)
                while node >= word * WORD and node >= 0:
                    if words:
                        bits |= uint64(1) << uint64(node - word * WORD)
                    if paths:
                        if depth >= 0:
                            path_table[row + depth] = node
                        depth = int32(depth - 1)
                    parent = above[node]
                    if parent >= node:
                        parent = int32(-1)
                    node = parent
                if words:
                    word_table[(first + i) * count + word] = bits
                word = int32(word - 1)
            if paths:
                while depth >= 0:
                    path_table[row + depth] = -1
                    depth = int32(depth - 1)

    return tree_mask_kernel


def tree_mask(parents, sizes, *, out, stream=None):
    """uint64[R, N, ceil(N / 64)] into out; returns out."""
    _launch(parents, None, sizes, None, out, None, None, stream)
    return out


def tree_paths(
    parents, depths, sizes, *, out, starts=None, positions=None, words=None, stream=None
):
    """int32[R, N, width] into out, of any width above the largest depth; returns out.

    Where they are given, the same launch fills `words` as tree_mask does, and `positions` with
    starts + depths, int32[R, N], a padding node standing with the root.
    """
    require("out", out, (*parents.shape, out.shape[-1]), "int32")
    if (starts is None) != (positions is None):
        raise ValueError("starts and positions: one without the other")
    _launch(parents, depths, sizes, starts, words, out, positions, stream)
    return out


def _launch(parents, depths, sizes, starts, words, paths, positions, stream) -> None:
    requests, nodes = parents.shape
    if nodes > MAX_NODES:
        raise ValueError(f"parents: {nodes} nodes, expected at most {MAX_NODES}")
    count = -(-nodes // WORD)
    require("parents", parents, (requests, nodes), "int32")
    require("sizes", sizes, (requests,), "int32")
    for name, array in (("depths", depths), ("positions", positions)):
        if array is not None:
            require(name, array, (requests, nodes), "int32")
    if starts is not None:
        require("starts", starts, (requests,), "int32")
    if words is not None:
        require("words", words, (requests, nodes, count), "uint64")
    body = make(words is not None, paths is not None, positions is not None)
    body.launch(
        (requests, -(-nodes // THREADS)),
        *(parents, depths, sizes, starts, words, paths, positions),
        *(nodes, count, 0 if paths is None else paths.shape[2]),
        stream=stream,
    )


def instances() -> list[Kernel]:
    """Bits alone, paths alone, what the verify forward takes, everything."""
    wanted = [(True, False, False), (False, True, False), (False, True, True), (True, True, True)]
    return [make(*outputs) for outputs in wanted]
