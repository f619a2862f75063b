"""The ordered sum alone, of partials that an all-gather has brought: the way between hosts."""

from functools import cache

from numba import cuda, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.all_reduce_call import MOST_RANKS, ordered_sum
from ddtree_numba.kernels.all_reduce_pull import PIECE, each_of, load, store
from ddtree_numba.kernels.arguments import bf16, element_of, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel

THREADS = 256


@cache
def make(world: int, element) -> Kernel:
    per = PIECE // read(element).dtype.itemsize
    each = each_of(world)
    count = 4 * each * world
    add_up = ordered_sum(world, element, 4)

    @kernel(
        threads=THREADS,
        name=f"all_reduce_gathered_{world}_{element}",
        registers=128,
        opcodes=("LDG.E.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def all_reduce_gathered_kernel(partials: read(element), out: write(element), pieces: int64):
        words = cuda.local.array(count, uint32)
        total = cuda.local.array(4, uint32)
        ptx.wait_for_previous()
        ptx.launch_next()
        first = int64(cuda.blockIdx.x) * (each * THREADS) + cuda.threadIdx.x
        for n in range(each):
            at = min(first + n * THREADS, pieces - 1)
            for s in range(world):
                load(partials, (s * pieces + at) * per, words, n * world + s)
        for n in range(each):
            add_up(words, 4 * n * world, total)
            if first + n * THREADS < pieces:
                store(out, (first + n * THREADS) * per, total, 0)

    return all_reduce_gathered_kernel


def sum_gathered(partials, *, out, stream=None):
    """partials [ranks, ...], as `spec/all_reduce.py` has them, added in rank order; returns out."""
    world = len(partials)
    if not 1 <= world <= MOST_RANKS:
        raise ValueError(f"partials: {world} ranks, from 1 to {MOST_RANKS} are possible")
    element = element_of("partials", partials)
    require("partials", partials, partials.shape)
    require("out", out, partials.shape[1:], partials.dtype)
    size = out.size * out.itemsize
    if size % PIECE:
        raise ValueError(f"out: {size} bytes, expected a multiple of {PIECE}")
    pieces = size // PIECE
    grid = -(-pieces // (each_of(world) * THREADS))
    make(world, element).launch(grid, partials, out, pieces, stream=stream)
    return out


def instances() -> list[Kernel]:
    return [make(world, bf16) for world in (2, 4, 8)]
