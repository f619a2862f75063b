"""A tree's size by step times on the device; see `spec/tree_size.py`. A warp a request.

Masses are integers, so a prefix sum in any order has the specification's bits, and all nodes of a
turn are judged at once: the first one that does not pay ends the tree.
"""

from numba import cuda, float32, float64, int32, int64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.numerics import mass
from ddtree_numba.kernels.selection import warp_prefix
from ddtree_numba.spec.numerics import MASS_BITS

ALL = 0xFFFFFFFF  # lanes
ROOT = 1 << MASS_BITS  # one token in any case


@kernel(threads=32, name="tree_size", registers=40, pdl=True, float64=True)
@cuda.jit
def tree_size_kernel(
    scores: read(float32),
    sizes: read(int32),
    seconds: read(float64),
    out: write(int32),
    nodes: int32,
):
    request, lane = cuda.blockIdx.x, int32(cuda.threadIdx.x)
    ptx.wait_for_previous()
    ptx.launch_next()
    size = sizes[request]
    kept, first, total = int32(1), int32(1), int64(ROOT)
    while kept == first and first < size:
        n, own = int32(first + lane), int64(0)
        if n < size:
            own = mass(scores[request * nodes + n])
        reached = total + warp_prefix(own)
        pays = False
        if n < size:
            pays = float64(reached) * seconds[n - 1] > float64(reached - own) * seconds[n]
        stops = cuda.ballot_sync(ALL, not pays)
        paying = int32(32)
        if stops != 0:
            paying = int32(31 - ptx.clz(stops & -stops))
        kept, first = int32(kept + paying), int32(first + 32)
        total = cuda.shfl_sync(ALL, reached, 31)
    if lane == 0:
        out[request] = min(kept, size)


def tree_size(scores, sizes, seconds, *, out, stream=None):
    """int32[R] into out; returns out."""
    requests, nodes = scores.shape
    require("scores", scores, (requests, nodes), "float32")
    require("sizes", sizes, (requests,), "int32")
    require("seconds", seconds, (nodes,), "float64")
    require("out", out, (requests,), "int32")
    tree_size_kernel.launch(requests, scores, sizes, seconds, out, nodes, stream=stream)
    return out


def instances() -> list[Kernel]:
    return [tree_size_kernel]
