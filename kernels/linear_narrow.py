"""Few tokens through a weight that is read once: the memory-bound side of `linear`.

A warp makes 16 rows of the weight times up to 72 tokens over one slice of K; the warps of a block
are the slices of a group, for one to four times 16 rows. Weights go from memory to registers, up to
a unit ahead, and start before the wait for the kernel ahead on the stream. Tokens come by
asynchronous copies, each lane's own 16 bytes: shared memory is only a longer register file, and the
loop has no barrier.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.linear_order import STEP, STEPS, UNIT, multiply

WARP = 32
ROWS = 16  # of a warp
SLOT = 512  # bytes of a step of 8 tokens: 16 of each lane
MANY_WARPS = 8  # of a block: up to here, and up to WAVE tiles, two blocks should fit
MOST_SHARED = 64 << 10, 72 << 10  # bytes of tokens, in blocks of up to MANY_WARPS and of more
WAVE = 5  # tiles of 8 tokens, at most, that are multiplied in turn
# Slices, at most, of kernels that let the next one in behind their wait: where one slice holds K,
# so many blocks fit beside each other that weights of launches to come would delay their tokens.
SETTLED = 1
PAD = ROWS + 4  # floats of a token's sums: lanes meet no bank twice


@cache
def make(slices: int, stack: int, columns: int, element, exact: bool) -> Kernel:
    """A block: `stack` x 16 weight rows, 8 x `columns` tokens, a warp for each 16 rows and slice.

    exact: slices fill K, so that nothing lies beyond it.
    """
    warps = slices * stack
    wave = max(n for n in range(1, WAVE + 1) if columns % n == 0)
    tokens_each = 8 * columns
    # steps of weights in registers: more sums leave fewer, in blocks of many warps fewer still
    ahead = STEPS if columns <= WAVE else STEPS // 2 if warps <= MANY_WARPS else 1
    held = STEPS  # steps of tokens in shared memory
    while warps * held * columns * SLOT > MOST_SHARED[warps > MANY_WARPS]:
        held //= 2
    words, pieces, count = 8 * ahead, 4 * wave, 4 * columns
    cells = ROWS * tokens_each
    slot_bytes = columns * SLOT
    ring = max(held * slot_bytes, 4 * PAD * tokens_each)
    narrow_out = element is bf16
    early = slices > SETTLED

    @cuda.jit(device=True, inline="always")
    def fetch(weight, low, high, column, width, a, n):
        """A step of a lane's two weight rows into registers."""
        if exact or column < width:
            a[n], a[n + 1], a[n + 2], a[n + 3] = ptx.ldg4_once(weight, low + column)
            a[n + 4], a[n + 5], a[n + 6], a[n + 7] = ptx.ldg4_once(weight, high + column)
        else:
            for i in range(8):
                a[n + i] = uint32(0)

    @cuda.jit(device=True, inline="always")
    def copy(slot, x, place, apart, tokens, column, width):
        """A step of a lane's tokens on its way; zeros where there is none."""
        for j in range(columns):
            there = 8 * j < tokens and (exact or column < width)
            ptx.copy16_part(slot + j * SLOT, x, place + j * apart + column, 16 if there else 0)
        ptx.copy_commit()

    @kernel(
        threads=WARP * warps,
        name=f"linear_narrow_{slices}x{stack}_{tokens_each}_{element}" + "_part" * (not exact),
        min_blocks=2 if warps <= MANY_WARPS and columns <= WAVE else 1,
        registers=208,
        shared_bytes=warps * ring,
        opcodes=("HMMA.16816.F32.BF16", "LDG.E.NA.LTC128B.128", "LDGSTS.E.BYPASS.128"),
        pdl=True,
    )
    @cuda.jit
    def linear_narrow_kernel(
        x: read(bf16),
        stride: int64,
        weight: read(bf16),
        out: write(element),
        tokens: int32,
        outs: int32,
        width: int32,
        units: int32,
    ):
        shared = cuda.shared.array(0, float32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        part, level = warp % slices, warp // slices
        first_row = (cuda.blockIdx.x * stack + level) * ROWS
        first_token = cuda.blockIdx.y * tokens_each
        column = int32((cuda.blockIdx.z * slices + part) * units * UNIT + (lane & 3) * 8)
        end = int32(column + units * UNIT)

        a = cuda.local.array(words, uint32)
        low = int64(min(first_row + (lane >> 2), outs - 1)) * width
        high = int64(min(first_row + (lane >> 2) + 8, outs - 1)) * width
        for u in range(ahead):
            fetch(weight, low, high, column + u * STEP, width, a, 8 * u)

        if early:
            ptx.launch_next()
        ptx.wait_for_previous()
        if not early:
            ptx.launch_next()
        token = first_token + (lane >> 2)
        place, apart, left = token * stride, 8 * stride, int32(tokens - token)
        mine = ptx.shared_address(shared) + warp * ring
        oldest = int32(mine + lane * 16)
        newest = int32(oldest + (held - 1) * slot_bytes)
        for u in range(held):
            copy(oldest + u * slot_bytes, x, place, apart, left, column + u * STEP, width)

        sums = cuda.local.array(count, float32)
        for i in range(count):
            sums[i] = float32(0)
        b = cuda.local.array(pieces, uint32)
        slot = oldest
        while column < end:
            for u in range(ahead):
                ptx.copy_wait(held - 1)
                for first in range(0, columns, wave):
                    for j in range(wave):
                        at = slot + (first + j) * SLOT
                        b[4 * j], b[4 * j + 1], b[4 * j + 2], b[4 * j + 3] = ptx.lds4(at)
                    for half in range(2):
                        for j in range(wave):
                            multiply(a, 8 * u, b, 4 * j, half, sums, 4 * (first + j))
                following = column + (u + ahead) * STEP
                if following < end:
                    fetch(weight, low, high, following, width, a, 8 * u)
                following = column + (u + held) * STEP
                if following < end:
                    copy(slot, x, place, apart, left, following, width)
                else:
                    ptx.copy_commit()
                slot = int32(slot + slot_bytes if slot < newest else oldest)
            column = int32(column + ahead * STEP)

        cuda.syncwarp()
        for j in range(columns):
            for n in range(4):
                token = 8 * j + 2 * (lane & 3) + (n & 1)
                cell = token * PAD + (lane >> 2) + 8 * (n >> 1)
                ptx.sts1_f(mine + 4 * cell, sums[4 * j + n])
        cuda.syncthreads()
        mine = ptx.shared_address(shared) + level * slices * ring
        base = int64(cuda.blockIdx.z) * tokens * outs
        cell = int32(part * WARP + lane)
        while cell < cells:
            token, row = cell // ROWS, cell % ROWS
            at = mine + 4 * (token * PAD + row)
            total = ptx.lds1_f(at)
            for n in range(1, slices):
                total = ptx.add(total, ptx.lds1_f(at + n * ring))
            token, row = first_token + token, first_row + row
            if token < tokens and row < outs:
                if narrow_out:
                    out[base + token * outs + row] = ptx.round_bf16(total)
                else:
                    out[base + token * outs + row] = total
            cell = int32(cell + slices * WARP)

    return linear_narrow_kernel
