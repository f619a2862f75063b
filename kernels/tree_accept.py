"""The accepted path on the device; see `spec/tree_accept.py`. A block a request.

Every node finds out at once whether its parent's target token is its own; of siblings that say so,
the lowest stays. What is left to one thread is to follow them from the root.
"""

from numba import cuda, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.spec.tree_accept import Accept
from ddtree_numba.spec.tree_build import Tree

THREADS = 128
MAX_NODES = 1024
NONE = MAX_NODES  # no child was chosen


@kernel(threads=THREADS, name="tree_accept", registers=40, pdl=True)
@cuda.jit
def tree_accept_kernel(
    tokens: read(int32),
    parents: read(int32),
    sizes: read(int32),
    target_tokens: read(int32),
    accepted: write(int32),
    counts: write(int32),
    next_tokens: write(int32),
    nodes: int32,
    width: int32,
):
    target = cuda.shared.array(MAX_NODES, int32)
    chosen = cuda.shared.array(MAX_NODES, int32)  # the child that holds the target's token
    token = cuda.shared.array(MAX_NODES, int32)
    parent = cuda.shared.array(MAX_NODES, int32)
    request, thread = cuda.blockIdx.x, int32(cuda.threadIdx.x)
    first = request * nodes
    ptx.wait_for_previous()
    ptx.launch_next()
    size = sizes[request]
    i = thread
    while i < size:
        target[i], chosen[i] = target_tokens[first + i], NONE
        token[i], parent[i] = tokens[first + i], parents[first + i]
        i = int32(i + THREADS)
    cuda.syncthreads()
    i = thread
    while i < size:
        p = parent[i]
        # a parent comes before its child: no walk is longer than the tree, whatever it holds
        if p >= 0 and p < i and target[p] == token[i] and token[i] >= 0:
            cuda.atomic.min(chosen, p, i)
        i = int32(i + THREADS)
    cuda.syncthreads()
    if thread == 0:
        count, node, following = int32(0), int32(0), int32(-1)
        while node < size and count < width:
            accepted[request * width + count] = node
            following = target[node]
            node = chosen[node]
            count = int32(count + 1)
        counts[request] = count
        next_tokens[request] = following
        while count < width:
            accepted[request * width + count] = -1
            count = int32(count + 1)


def tree_accept(tree: Tree, target_tokens, *, out: Accept, stream=None) -> Accept:
    """Every request's path into the arrays of `out`; returns out.

    The width of out.nodes is the caller's: paths end there, and the largest depth + 1 holds all.
    """
    requests, nodes = tree.parents.shape
    if nodes > MAX_NODES:
        raise ValueError(f"tree: {nodes} nodes, expected at most {MAX_NODES}")
    for name in ("tokens", "parents"):
        require(f"tree.{name}", getattr(tree, name), (requests, nodes), "int32")
    require("tree.sizes", tree.sizes, (requests,), "int32")
    require("target_tokens", target_tokens, (requests, nodes), "int32")
    width = out.nodes.shape[-1]
    require("out.nodes", out.nodes, (requests, width), "int32")
    require("out.counts", out.counts, (requests,), "int32")
    require("out.next_tokens", out.next_tokens, (requests,), "int32")
    tree_accept_kernel.launch(
        requests,
        *(tree.tokens, tree.parents, tree.sizes, target_tokens),
        *(out.nodes, out.counts, out.next_tokens, nodes, width),
        stream=stream,
    )
    return out


def instances() -> list[Kernel]:
    return [tree_accept_kernel]
