"""First child and next sibling on the device; see `spec/tree_links.py`.

A thread looks through the nodes behind its own, last to first: the latest it meets is the lowest.
"""

from numba import cuda, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel

THREADS = 128  # nodes of a block
MAX_NODES = 1024


@kernel(threads=THREADS, name="tree_links", registers=32, pdl=True)
@cuda.jit
def tree_links_kernel(
    parents: read(int32),
    sizes: read(int32),
    first_child: write(int32),
    next_sibling: write(int32),
    nodes: int32,
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
        child, sibling = int32(-1), int32(-1)
        if i < size:
            parent = above[i]
            j = int32(size - 1)
            while j > i:
                if above[j] == i:
                    child = j
                if above[j] == parent:
                    sibling = j
                j = int32(j - 1)
        first_child[first + i] = child
        next_sibling[first + i] = sibling


def tree_links(parents, sizes, *, out, stream=None):
    """(first_child, next_sibling) into the pair out; returns out."""
    requests, nodes = parents.shape
    if nodes > MAX_NODES:
        raise ValueError(f"parents: {nodes} nodes, expected at most {MAX_NODES}")
    require("parents", parents, (requests, nodes), "int32")
    require("sizes", sizes, (requests,), "int32")
    first_child, next_sibling = out
    require("first_child", first_child, (requests, nodes), "int32")
    require("next_sibling", next_sibling, (requests, nodes), "int32")
    grid = (requests, -(-nodes // THREADS))
    tree_links_kernel.launch(grid, parents, sizes, first_child, next_sibling, nodes, stream=stream)
    return out


def instances() -> list[Kernel]:
    return [tree_links_kernel]
