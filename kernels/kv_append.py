"""Key rows of the tree's nodes into the scratch area; see `spec/kv_append.py`.

A thread moves up to four pieces of 16 bytes of one row, evenly spaced: the row is found once, and
all loads are under way together. Each array may be a view whose rows lie apart. Rows that are not
in L2 are called there ahead of the wait: a prefetch reads no value.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.pieces import BYTES, WORDS, load16, store16, strides_of

THREADS = 128
MOST = 4  # pieces of a thread


def lanes_of(pieces: int) -> int:
    """Threads of a row: they share its pieces evenly."""
    return pieces // max(n for n in range(1, MOST + 1) if pieces % n == 0)


@cache
def make(element, latent_width: int, rope_width: int) -> Kernel:
    piece = BYTES // read(element).dtype.itemsize
    pieces = (latent_width + rope_width) // piece
    lanes = lanes_of(pieces)
    each, step = pieces // lanes, lanes * piece
    count = each * WORDS

    @kernel(
        threads=THREADS,
        name=f"kv_append_{element}_{latent_width}_{rope_width}",
        registers=40,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def kv_append_kernel(
        latent: read(element),
        latent_request: int64,
        latent_node: int64,
        k_rope: read(element),
        rope_request: int64,
        rope_node: int64,
        scratch: write(element),
        scratch_request: int64,
        scratch_node: int64,
        nodes: int32,
    ):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        node = i // lanes
        column = (i - node * lanes) * piece
        request = cuda.blockIdx.y
        words = cuda.local.array(count, uint32)
        left = request * latent_request + node * latent_node + column
        right = request * rope_request + node * rope_node + column - latent_width
        if node < nodes:
            for n in range(each):
                if column + n * step < latent_width:
                    ptx.prefetch_l2(latent, left + n * step)
                else:
                    ptx.prefetch_l2(k_rope, right + n * step)
        ptx.wait_for_previous()
        if node < nodes:
            for n in range(each):
                if column + n * step < latent_width:
                    load16(latent, left + n * step, words, WORDS * n)
                else:
                    load16(k_rope, right + n * step, words, WORDS * n)
            ptx.launch_next()
            at = request * scratch_request + node * scratch_node + column
            for n in range(each):
                store16(scratch, at + n * step, words, WORDS * n)

    return kv_append_kernel


def kv_append(latent, k_rope, scratch, *, stream=None):
    """scratch[r, i] = [latent[r, i] | k_rope[r, i]], in place; returns scratch."""
    requests, nodes, latent_width = latent.shape
    rope_width = k_rope.shape[-1]
    for name, array, width in (
        ("k_rope", k_rope, rope_width),
        ("scratch", scratch, latent_width + rope_width),
    ):
        if array.shape != (requests, nodes, width):
            raise ValueError(f"{name}: shape {array.shape} does not fit latent {latent.shape}")
        if array.dtype != latent.dtype:
            raise ValueError(f"{name}: dtype {array.dtype}, expected {latent.dtype}")
    piece = BYTES // latent.itemsize
    lanes = lanes_of((latent_width + rope_width) // piece)
    make(element_of("latent", latent), latent_width, rope_width).launch(
        (-(-nodes * lanes // THREADS), requests),
        latent,
        *strides_of("latent", latent, 2, piece),
        k_rope,
        *strides_of("k_rope", k_rope, 2, piece),
        scratch,
        *strides_of("scratch", scratch, 2, piece),
        nodes,
        stream=stream,
    )
    return scratch


def instances() -> list[Kernel]:
    """Key rows of K2.6 and of the embedded model."""
    return [make(bf16, 512, 64), make(bf16, 64, 16), make(float32, 64, 16)]
