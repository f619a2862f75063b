"""A row of logits spread over blocks: which tokens a thread has, and how blocks come together.

A thread has two or four quads of four tokens, so that a block of 256 threads takes 2,048 or 4,096.
What the blocks of a row find is merged by maxima and integer sums, which have the same result in
any order; the block that arrives last finishes the row and leaves its state as it was, so that
workspaces are zeroed only once.
"""

from functools import cache

from numba import cuda, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16
from ddtree_numba.kernels.numerics import ID_BITS, LAST_ID

THREADS = 256  # of a block; any number of whole warps gives the same results
MOST_WARPS = 32
QUAD = 4  # tokens that share a load, and a block of noise


def blocks_of(vocabulary: int, threads: int, each: int) -> int:
    """Blocks of a row, with `each` tokens of a thread."""
    return -(-vocabulary // (threads * each))


@cuda.jit(device=True, inline="always")
def column_of(block, k, each):
    """Column of token k of this thread in a block of the row."""
    quad = (block * (each // QUAD) + k // QUAD) * cuda.blockDim.x + cuda.threadIdx.x
    return quad * QUAD + k % QUAD


@cuda.jit(device=True, inline="always")
def _quad_bf16(x, i, values, k):
    a, b = ptx.ldg2(x, i)
    values[k] = ptx.as_float(a << 16)
    values[k + 1] = ptx.as_float(a & 0xFFFF0000)
    values[k + 2] = ptx.as_float(b << 16)
    values[k + 3] = ptx.as_float(b & 0xFFFF0000)


@cuda.jit(device=True, inline="always")
def _quad_float32(x, i, values, k):
    values[k], values[k + 1], values[k + 2], values[k + 3] = ptx.ldg4_f(x, i)


@cuda.jit(device=True, inline="always")
def _one_bf16(x, i):
    return ptx.as_float(uint32(x[i]) << 16)


@cuda.jit(device=True, inline="always")
def _one_float32(x, i):
    return x[i]


@cache
def loader(element, aligned: bool, each: int):
    """load(logits, row, block, width, values): a thread's tokens as float32, where there are any.

    Rows of a multiple of four tokens are `aligned`; others are read token by token.
    """
    quad = _quad_bf16 if element is bf16 else _quad_float32
    one = _one_bf16 if element is bf16 else _one_float32

    @cuda.jit(device=True, inline="always")
    def load(logits, row, block, width, values):
        for k in range(0, each, QUAD):
            column = column_of(block, k, each)
            if aligned:
                if column < width:
                    quad(logits, row * width + column, values, k)
            else:
                for i in range(QUAD):
                    if column + i < width:
                        values[k + i] = one(logits, row * width + column + i)

    return load


@cuda.jit(device=True, inline="always")
def warp_max(key):
    """The greatest key of a warp, in every lane."""
    high, low = key >> ID_BITS, key & LAST_ID
    top = int64(ptx.redux_max(high))
    if high != top:
        low = int64(0)
    return (top << ID_BITS) + int64(ptx.redux_max(low))


@cuda.jit(device=True, inline="always")
def block_max(key):
    """The greatest key of the block, in thread 0."""
    keys = cuda.shared.array(MOST_WARPS, int64)
    thread = cuda.threadIdx.x
    key = warp_max(key)
    if thread & 31 == 0:
        keys[thread >> 5] = key
    cuda.syncthreads()
    if thread == 0:
        w = 1
        while w < cuda.blockDim.x >> 5:
            key = max(key, keys[w])
            w += 1
    return key


@cuda.jit(device=True, inline="always")
def arrive(state, counter):
    """Whether this block is the last of its row; it then sees what the others have written."""
    cuda.syncthreads()
    last = 0
    if cuda.threadIdx.x == 0:
        before = int64(ptx.atom_add_acq_rel(state, counter, 1))
        if before == cuda.gridDim.x - 1:
            last = 1
            state[counter] = 0
    return cuda.syncthreads_or(last)
