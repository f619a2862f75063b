"""The end of a round on the device; see `spec/round_advance.py`. A thread a word of the report.

What the specification refuses cannot be raised here: a node outside of the tree reports -1.
"""

from numba import cuda, int32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, require, update, write
from ddtree_numba.kernels.launch import Kernel, kernel

THREADS = 128


@kernel(threads=THREADS, name="round_advance", registers=32, pdl=True)
@cuda.jit
def round_advance_kernel(
    roots: update(int32),
    starts: update(int32),
    room: update(int32),
    tree_tokens: read(int32),
    nodes: read(int32),
    counts: read(int32),
    next_tokens: read(int32),
    tokens: write(int32),
    requests: int32,
    tree: int32,
    depths: int32,
):
    i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    request = i // depths
    column = i - request * depths
    ptx.wait_for_previous()
    ptx.launch_next()
    if request < requests:
        # three loads under way together, behind them the token
        count, following, node = counts[request], next_tokens[request], int32(-1)
        if column + 1 < depths:
            node = nodes[i + 1]
        token = int32(-1)
        if column + 1 < count and node >= 0 and node < tree:
            token = tree_tokens[request * tree + node]
        elif column + 1 == count:
            token = following
        tokens[i] = token
        if column == 0 and count > 0:
            if following != -1:
                roots[request] = following
            starts[request] += count
            room[request] -= count


def round_advance(
    roots, starts, room, tree_tokens, nodes, counts, next_tokens, *, out, stream=None
):
    """The emitted tokens into out; roots, starts and room move on in place; returns out."""
    requests, depths = nodes.shape
    rows = dict(roots=roots, starts=starts, room=room, counts=counts, next_tokens=next_tokens)
    for name, array in rows.items():
        require(name, array, (requests,), "int32")
    require("nodes", nodes, nodes.shape, "int32")
    require("tree_tokens", tree_tokens, (requests, tree_tokens.shape[-1]), "int32")
    require("out", out, nodes.shape, "int32")
    round_advance_kernel.launch(
        -(-requests * depths // THREADS),
        *(roots, starts, room, tree_tokens, nodes, counts, next_tokens, out),
        *(requests, tree_tokens.shape[1], depths),
        stream=stream,
    )
    return out


def instances() -> list[Kernel]:
    return [round_advance_kernel]
