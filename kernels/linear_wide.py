"""Many tokens through a weight, in the narrow kernel's order: the compute-bound side of `linear`.

A block makes a tile of weight rows and tokens, 32 x 64 of it a warp, and walks the slices one
after another: a slice's chain in one set of registers, the sum of those before in another. A ring
of asynchronous copies holds steps of 64 bytes a row, which lanes read as the narrow kernel does.

Where tiles are too few for the chip, a block takes one slice, or one group, and leaves its sums in
a workspace, float32[parts, tokens, outs]; `make_sum` adds them in order.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.linear_order import STEP, STEPS, multiply

WARP = 32
ROWS, TOKENS = 32, 64  # of a warp: 64 sums a lane
TILES, COLUMNS = ROWS // 16, TOKENS // 8
LINE = 2 * STEP  # bytes of a row in a stage; 8 rows are read without meeting a bank twice
STAGES = 4
SUMS = TILES * COLUMNS * 4
WAVE = 4  # tiles of 8 tokens that are multiplied in turn
PIECES, A_WORDS = 4 * WAVE, 8 * TILES
PASS = 32  # tokens of a warp that leave through shared memory at once


@cuda.jit(device=True, inline="always")
def take(at, words, count):
    """A lane's 16 bytes of `count` groups of 8 rows, out of a stage."""
    for i in range(count):
        n = 4 * i
        words[n], words[n + 1], words[n + 2], words[n + 3] = ptx.lds4(at + i * 8 * LINE)


@cache
def make(down: int, across: int, element, exact: bool) -> Kernel:
    """down x across warps; exact: slices fill K, so that nothing lies beyond it."""
    threads = WARP * down * across
    rows, tokens_each = ROWS * down, TOKENS * across
    stage = (rows + tokens_each) * LINE
    lines = threads // 4  # rows that one copy of every thread covers
    narrow_out = element is bf16
    size = 2 if narrow_out else 4
    vector = 16 // size  # sums of a 16-byte store
    pad = ROWS * size + 16
    pieces = ROWS // vector

    @cuda.jit(device=True, inline="always")
    def copy(slot, source, row, end, apart, column, width, count):
        """A step of `count` rows of a matrix; zeros beyond its last row and its width."""
        line, piece = cuda.threadIdx.x >> 2, cuda.threadIdx.x & 3
        for n in range(count // lines):
            to = slot + (line + n * lines) * LINE + piece * 16
            there = row + line + n * lines < end and (exact or column + piece * 8 < width)
            place = int64(row + line + n * lines) * apart + column + piece * 8
            ptx.copy16_part(to, source, place, 16 if there else 0)

    @kernel(
        threads=threads,
        name=f"linear_wide_{rows}x{tokens_each}_{element}" + "_part" * (not exact),
        registers=255,
        shared_bytes=STAGES * stage,
        opcodes=("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS", "LDS.128", "STG.E.128"),
        pdl=True,
    )
    @cuda.jit
    def linear_wide_kernel(
        x: read(bf16),
        stride: int64,
        weight: read(bf16),
        out: write(element),
        tokens: int32,
        outs: int32,
        width: int32,
        units: int32,
        slices: int32,
    ):
        shared = cuda.shared.array(0, float32)
        base = ptx.shared_address(shared)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        first_token, first_row = cuda.blockIdx.x * tokens_each, cuda.blockIdx.y * rows
        chain = int32(units * STEPS)
        left = int32(slices * chain)
        column = int32(cuda.blockIdx.z * left * STEP)

        for n in range(STAGES - 1):
            to = column + n * STEP
            copy(base + n * stage, weight, first_row, outs, width, to, width, rows)
        ptx.wait_for_previous()
        ptx.launch_next()
        for n in range(STAGES - 1):
            slot, to = base + n * stage + rows * LINE, column + n * STEP
            copy(slot, x, first_token, tokens, stride, to, width, tokens_each)
            ptx.copy_commit()

        sums = cuda.local.array(SUMS, float32)
        totals = cuda.local.array(SUMS, float32)
        a = cuda.local.array(A_WORDS, uint32)
        b = cuda.local.array(PIECES, uint32)
        a_next = cuda.local.array(A_WORDS, uint32)
        b_next = cuda.local.array(PIECES, uint32)
        rows_at = (warp % down) * (ROWS * LINE) + lane * 16
        tokens_at = rows * LINE + (warp // down) * (TOKENS * LINE) + lane * 16
        last = int32(base + (STAGES - 1) * stage)
        slot, free = int32(base), last
        ptx.copy_wait(STAGES - 2)
        cuda.syncthreads()
        take(slot + rows_at, a_next, 2 * TILES)
        take(slot + tokens_at, b_next, WAVE)
        first = True
        while left > 0:
            for i in range(SUMS):
                sums[i] = float32(0)
            step = chain
            while step > 0:
                ptx.copy_wait(STAGES - 3)
                cuda.syncthreads()
                if left > STAGES - 1:
                    to = column + (STAGES - 1) * STEP
                    copy(free, weight, first_row, outs, width, to, width, rows)
                    slot_x = free + rows * LINE
                    copy(slot_x, x, first_token, tokens, stride, to, width, tokens_each)
                ptx.copy_commit()
                for i in range(A_WORDS):
                    a[i] = a_next[i]
                for i in range(PIECES):
                    b[i] = b_next[i]
                following = int32(slot + stage if slot < last else base)
                for wave in range(0, COLUMNS, WAVE):
                    if wave + WAVE < COLUMNS:
                        take(slot + tokens_at + (wave + WAVE) * 8 * LINE, b_next, WAVE)
                    else:
                        take(following + tokens_at, b_next, WAVE)
                        take(following + rows_at, a_next, 2 * TILES)
                    for half in range(2):
                        for j in range(WAVE):
                            for i in range(TILES):
                                n = (i * COLUMNS + wave + j) * 4
                                multiply(a, 8 * i, b, 4 * j, half, sums, n)
                    if wave + WAVE < COLUMNS:
                        for i in range(PIECES):
                            b[i] = b_next[i]
                free, slot = slot, following
                column = int32(column + STEP)
                left = int32(left - 1)
                step = int32(step - 1)
            if first:
                for i in range(SUMS):
                    totals[i] = sums[i]
            else:
                for i in range(SUMS):
                    totals[i] = ptx.add(totals[i], sums[i])
            first = False

        ptx.copy_wait(0)
        cuda.syncthreads()
        mine = base + warp * (PASS * pad)
        base_out = int64(cuda.blockIdx.z) * tokens * outs
        row = first_row + (warp % down) * ROWS
        token = first_token + (warp // down) * TOKENS
        for part in range(TOKENS // PASS):
            for j in range(PASS // 8):
                for i in range(TILES):
                    for n in range(4):
                        value = totals[(i * COLUMNS + part * (PASS // 8) + j) * 4 + n]
                        line = 8 * j + 2 * (lane & 3) + (n & 1)
                        to = mine + line * pad + (16 * i + (lane >> 2) + 8 * (n >> 1)) * size
                        if narrow_out:
                            ptx.sts1_h(to, ptx.round_bf16(value))
                        else:
                            ptx.sts1_f(to, value)
            cuda.syncwarp()
            for n in range(PASS * pieces // WARP):
                cell = lane + n * WARP
                line, piece = cell // pieces, cell % pieces
                to_token, to_row = token + part * PASS + line, row + piece * vector
                w0, w1, w2, w3 = ptx.lds4(mine + line * pad + piece * 16)
                at = base_out + to_token * outs + to_row
                if to_token < tokens and to_row < outs:
                    if outs % vector == 0:
                        ptx.stg4(out, at, w0, w1, w2, w3)
                    else:
                        b[0], b[1], b[2], b[3] = w0, w1, w2, w3
                        for i in range(vector):
                            if to_row + i < outs:
                                if narrow_out:
                                    out[at + i] = b[i // 2] >> (16 * (i % 2))
                                else:
                                    out[at + i] = ptx.as_float(b[i])
            cuda.syncwarp()

    return linear_wide_kernel


THREADS = 128
AT_ONCE = 8  # loads under way


@cache
def make_sum(element) -> Kernel:
    """out[i] = parts[0, i] + parts[1, i] + ..., rounded once."""
    narrow_out = element is bf16

    @kernel(threads=THREADS, name=f"linear_sum_{element}", registers=40, pdl=True)
    @cuda.jit
    def linear_sum_kernel(parts: read(float32), out: write(element), count: int64, number: int32):
        i = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        ptx.launch_next()
        ptx.wait_for_previous()
        if i < count:
            values = cuda.local.array(AT_ONCE, float32)
            total = parts[i]
            n = int32(1)
            while n < number:
                for k in range(AT_ONCE):
                    if n + k < number:
                        values[k] = parts[(n + k) * count + i]
                    else:
                        values[k] = float32(0)
                for k in range(AT_ONCE):
                    if n + k < number:
                        total = ptx.add(total, values[k])
                n = int32(n + AT_ONCE)
            if narrow_out:
                out[i] = ptx.round_bf16(total)
            else:
                out[i] = total

    return linear_sum_kernel
