"""A kernel as product kernels look, for tests of the machinery: y[T, N] = x[T, K] weight[N, K]^T.

Weights are the 16 rows of the mma, 8 tokens its columns. A block of four warps makes 64 columns of
y; tiles of 64 k come through a ring of three asynchronous copies; sums leave through shared memory.
"""

from numba import cuda, float32, int32, uint16

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import kernel

THREADS = 128
ROWS, TOKENS, DEPTH = 64, 8, 64  # of a tile: weight rows, tokens, k
STRIDE = 2 * DEPTH + 16  # bytes of a row in shared memory: ldmatrix meets no bank twice
TILE = (ROWS + TOKENS) * STRIDE
STAGES = 3
WORDS = STAGES * TILE // 2


@cuda.jit(device=True, inline="always")
def fetch(ring, slot, weight, x, first, step, depth):
    """Start copying tile `step` into its slot: 8 pieces of 16 bytes a row."""
    thread = cuda.threadIdx.x
    piece, line = (thread & 7), thread >> 3
    for n in range(ROWS // 16):
        row = line + 16 * n
        source = (first + row) * depth + step * DEPTH + piece * 8
        ptx.copy16(ring + slot * TILE + row * STRIDE + piece * 16, weight, source)
    if line < TOKENS:
        source = line * depth + step * DEPTH + piece * 8
        ptx.copy16(ring + slot * TILE + (ROWS + line) * STRIDE + piece * 16, x, source)


@kernel(threads=THREADS, registers=96, opcodes=("HMMA.16816.F32.BF16", "LDSM", "LDGSTS.E.BYPASS"))
@cuda.jit
def skinny_gemm(x: read(bf16), weight: read(bf16), y: write(float32), steps: int32):
    shared = cuda.shared.array(WORDS, uint16, alignment=16)
    ring = ptx.shared_address(shared)
    lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    first = cuda.blockIdx.x * ROWS
    depth = steps * DEPTH
    d0 = d1 = d2 = d3 = float32(0)
    for stage in range(STAGES - 1):
        if stage < steps:
            fetch(ring, stage, weight, x, first, stage, depth)
        ptx.copy_commit()
    a_row = (warp * 16 + (lane & 15)) * STRIDE + (lane >> 4) * 16
    b_row = (ROWS + (lane & 7)) * STRIDE + (lane >> 3 & 1) * 16
    slot = int32(0)
    step = int32(0)
    while step < steps:
        ptx.copy_wait(STAGES - 2)
        cuda.syncthreads()
        following = step + STAGES - 1
        if following < steps:
            free = slot - 1 if slot > 0 else STAGES - 1
            fetch(ring, free, weight, x, first, following, depth)
        ptx.copy_commit()
        tile = ring + slot * TILE
        for k in range(DEPTH // 16):
            a0, a1, a2, a3 = ptx.ldmatrix4(tile + a_row + 32 * k)
            b0, b1 = ptx.ldmatrix2(tile + b_row + 32 * k)
            d0, d1, d2, d3 = ptx.mma(a0, a1, a2, a3, b0, b1, d0, d1, d2, d3)
        slot = int32(slot + 1 if slot < STAGES - 1 else 0)
        step = int32(step + 1)
    cuda.syncthreads()
    column, token = warp * 16 + (lane >> 2), (lane & 3) * 2
    sums = ring + token * ROWS * 4 + column * 4
    ptx.sts1_f(sums, d0)
    ptx.sts1_f(sums + 4 * ROWS, d1)
    ptx.sts1_f(sums + 32, d2)
    ptx.sts1_f(sums + 4 * ROWS + 32, d3)
    cuda.syncthreads()
    i = cuda.threadIdx.x
    while i < TOKENS * ROWS:
        row = i >> 6
        y[row * ROWS * cuda.gridDim.x + first + (i & 63)] = ptx.lds1_f(ring + i * 4)
        i += THREADS
