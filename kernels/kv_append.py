"""Key rows of the tree's nodes into the scratch area; see `spec/kv_append.py`.

A thread moves two pieces of 16 bytes. Each array may be a view whose rows lie apart.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, element_of, read, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.pieces import BYTES, WORDS, load16, store16, strides_of

THREADS = 128
EACH = 2  # pieces of a thread


@cache
def make(element, latent_width: int, rope_width: int) -> Kernel:
    piece, count = BYTES // read(element).dtype.itemsize, WORDS * EACH
    pieces = (latent_width + rope_width) // piece

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
        request = cuda.blockIdx.y
        first = cuda.blockIdx.x * (THREADS * EACH) + cuda.threadIdx.x
        words = cuda.local.array(count, uint32)
        ptx.launch_next()
        ptx.wait_for_previous()
        for n in range(EACH):
            i = int32(first + n * THREADS)
            node = i // pieces
            column = (i - node * pieces) * piece
            if node < nodes:
                if column < latent_width:
                    at = request * latent_request + node * latent_node + column
                    load16(latent, at, words, WORDS * n)
                else:
                    at = request * rope_request + node * rope_node + column - latent_width
                    load16(k_rope, at, words, WORDS * n)
        for n in range(EACH):
            i = int32(first + n * THREADS)
            node = i // pieces
            column = (i - node * pieces) * piece
            if node < nodes:
                at = request * scratch_request + node * scratch_node + column
                store16(scratch, at, words, WORDS * n)

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
    pieces = (latent_width + rope_width) // piece
    make(element_of("latent", latent), latent_width, rope_width).launch(
        (-(-nodes * pieces // (THREADS * EACH)), requests),
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
