"""Many tokens through a weight, in the narrow kernel's order: the compute-bound side of `linear`.

A block makes a tile of weight rows and tokens, and walks the slices one after another: a slice's
chain in one set of registers, the sum of those before in another. A ring of asynchronous copies
holds stages of two steps, which lanes read as the narrow kernel does, ahead of use. The one barrier
of a stage stands before its last products: their operands are in registers by then, and behind it
the stage is filled anew.

Where tiles are too few for the chip, a block takes one slice, or one group, and leaves its sums in
a workspace, float32[parts, tokens, outs]; `make_sum` adds them in order.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.linear_order import STEP, STEPS, multiply

WARP = 32
TILES = 2  # of 16 weight rows, a warp
ROWS = 16 * TILES
A_WORDS = 8 * TILES
LINE = 2 * STEP  # bytes of a row in a step; 8 rows are read without meeting a bank twice
STAGE = 2  # steps: 128 bytes of a row
SHIFT = 64  # bytes between the steps of a stage: a row's two lines are written to other banks


class Tile(NamedTuple):
    """Of a block: down x across warps, each 32 weight rows and `columns` x 8 tokens."""

    columns: int
    down: int
    across: int
    ring: int  # stages; no more than the shortest slice has, 4

    @property
    def rows(self) -> int:
        return ROWS * self.down

    @property
    def tokens(self) -> int:
        return 8 * self.columns * self.across

    def number(self, tokens: int, outs: int) -> int:
        """Of tiles that so many tokens and rows take."""
        return -(-tokens // self.tokens) * -(-outs // self.rows)


@cuda.jit(device=True, inline="always")
def take(at, words, count):
    """A lane's 16 bytes of `count` groups of 8 rows, out of a step."""
    for i in range(count):
        n = 4 * i
        words[n], words[n + 1], words[n + 2], words[n + 3] = ptx.lds4(at + i * 8 * LINE)


@cache
def make(tile: Tile, element, exact: bool) -> Kernel:
    """exact: slices fill K, so that nothing lies beyond it."""
    columns, down, across, ring = tile
    rows, tokens_each = tile.rows, tile.tokens
    threads = WARP * down * across
    step_bytes = (rows + tokens_each) * LINE + SHIFT
    stage = STAGE * step_bytes
    lines = threads // 8  # rows that one copy of every thread covers
    wave = next(n for n in (4, 3, 2, 1) if columns % n == 0)  # columns that are multiplied in turn
    final = columns - wave
    count, pieces = 4 * TILES * columns, 4 * wave
    narrow_out = element is bf16
    size = 2 if narrow_out else 4
    vector = 16 // size  # sums of a 16-byte store
    pad = ROWS * size + 16
    vectors = ROWS // vector
    passed = 8 * wave  # tokens of a warp that leave through shared memory at once

    @cuda.jit(device=True, inline="always")
    def copy(slot, source, apart, number, end, room):
        """A thread's lines of a matrix; zeros from line `end` on, and where no `room` is left."""
        for n in range(number):
            there = n * lines < end and (exact or room > 0)
            ptx.copy16_part(slot + n * lines * LINE, source, n * apart, 16 if there else 0)

    @cuda.jit(device=True, inline="always")
    def products(a, b, first, sums):
        for half in range(2):
            for j in range(wave):
                for i in range(TILES):
                    multiply(a, 8 * i, b, 4 * j, half, sums, (i * columns + first + j) * 4)

    @cuda.jit(device=True, inline="always")
    def early(at, a, b, a_next, b_next, sums, zero):
        """All products of a step but the last wave's, and the operands of that.

        Through xor with a `zero` that it does not know, the assembler brings the weights into the
        order of mma's operand once; plain moves it repeats for every product.
        """
        for i in range(A_WORDS):
            a[i] = a_next[i] ^ zero
        for i in range(pieces):
            b[i] = b_next[i]
        for first in range(0, final, wave):
            take(at + (first + wave) * 8 * LINE, b_next, wave)
            products(a, b, first, sums)
            for i in range(pieces):
                b[i] = b_next[i]

    @kernel(
        threads=threads,
        name=f"linear_wide_{rows}x{tokens_each}_{element}" + "_part" * (not exact),
        min_blocks=2 if threads <= 128 else 1,
        registers=255,
        shared_bytes=ring * stage,
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
        chain = int32(units * (STEPS // STAGE))
        left = int32(slices * chain)  # stages
        line, piece = cuda.threadIdx.x >> 3, cuda.threadIdx.x & 7
        column = int32(cuda.blockIdx.z * left * (STAGE * STEP) + piece * 8)
        end_w, end_x = int32(outs - first_row - line), int32(tokens - first_token - line)
        room = int32(width - column)
        from_w = ptx.at(weight, int64(first_row + line) * width + column)
        from_x = ptx.at(x, int64(first_token + line) * stride + column)
        apart_w, apart_x = int64(width) * lines, stride * lines
        to_w = (piece >> 2) * step_bytes + line * LINE + (piece & 3) * 16
        to_x = to_w + rows * LINE
        zero = uint32(units >> 30)

        for n in range(ring):
            left_there = room - n * STAGE * STEP
            copy(base + n * stage + to_w, from_w, apart_w, rows // lines, end_w, left_there)
            from_w = ptx.at(from_w, STAGE * STEP)
        ptx.wait_for_previous()
        ptx.launch_next()
        for n in range(ring):
            left_there = room - n * STAGE * STEP
            copy(base + n * stage + to_x, from_x, apart_x, tokens_each // lines, end_x, left_there)
            from_x = ptx.at(from_x, STAGE * STEP)
            ptx.copy_commit()
        room = int32(room - ring * STAGE * STEP)

        sums = cuda.local.array(count, float32)
        totals = cuda.local.array(count, float32)
        a = cuda.local.array(A_WORDS, uint32)
        b = cuda.local.array(pieces, uint32)
        a_next = cuda.local.array(A_WORDS, uint32)
        b_next = cuda.local.array(pieces, uint32)
        rows_at = (warp % down) * (ROWS * LINE) + lane * 16
        tokens_at = rows * LINE + (warp // down) * (columns * 8 * LINE) + lane * 16
        last = int32(base + (ring - 1) * stage)
        slot = int32(base)
        ptx.copy_wait(ring - 1)
        cuda.syncthreads()
        take(slot + rows_at, a_next, 2 * TILES)
        take(slot + tokens_at, b_next, wave)
        first = True
        while left > 0:
            for i in range(count):
                sums[i] = float32(0)
            stages = chain
            while stages > 0:
                following = int32(slot + stage if slot < last else base)
                early(slot + tokens_at, a, b, a_next, b_next, sums, zero)
                take(slot + step_bytes + tokens_at, b_next, wave)
                take(slot + step_bytes + rows_at, a_next, 2 * TILES)
                products(a, b, final, sums)
                early(slot + step_bytes + tokens_at, a, b, a_next, b_next, sums, zero)
                ptx.copy_wait(ring - 2)
                cuda.syncthreads()
                take(following + tokens_at, b_next, wave)
                take(following + rows_at, a_next, 2 * TILES)
                more_w = end_w if left > ring else int32(0)
                more_x = end_x if left > ring else int32(0)
                copy(slot + to_w, from_w, apart_w, rows // lines, more_w, room)
                copy(slot + to_x, from_x, apart_x, tokens_each // lines, more_x, room)
                ptx.copy_commit()
                products(a, b, final, sums)
                from_w = ptx.at(from_w, STAGE * STEP)
                from_x = ptx.at(from_x, STAGE * STEP)
                room = int32(room - STAGE * STEP)
                slot = following
                left = int32(left - 1)
                stages = int32(stages - 1)
            if first:
                for i in range(count):
                    totals[i] = sums[i]
            else:
                for i in range(count):
                    totals[i] = ptx.add(totals[i], sums[i])
            first = False

        ptx.copy_wait(0)
        cuda.syncthreads()
        mine = base + warp * (passed * pad)
        base_out = int64(cuda.blockIdx.z) * tokens * outs
        row = first_row + (warp % down) * ROWS
        token = first_token + (warp // down) * (8 * columns)
        for part in range(columns // wave):
            for j in range(wave):
                for i in range(TILES):
                    for n in range(4):
                        value = totals[(i * columns + part * wave + j) * 4 + n]
                        line = 8 * j + 2 * (lane & 3) + (n & 1)
                        to = mine + line * pad + (16 * i + (lane >> 2) + 8 * (n >> 1)) * size
                        if narrow_out:
                            ptx.sts1_h(to, ptx.round_bf16(value))
                        else:
                            ptx.sts1_f(to, value)
            cuda.syncwarp()
            for n in range(passed * vectors // WARP):
                cell = lane + n * WARP
                line, piece = cell // vectors, cell % vectors
                to_token, to_row = token + part * passed + line, row + piece * vector
                w0, w1, w2, w3 = ptx.lds4(mine + line * pad + piece * 16)
                at = base_out + to_token * outs + to_row
                if to_token < tokens and to_row < outs:
                    if outs % vector == 0:
                        ptx.stg4(out, at, w0, w1, w2, w3)
                    else:
                        a[0], a[1], a[2], a[3] = w0, w1, w2, w3
                        for i in range(vector):
                            if to_row + i < outs:
                                if narrow_out:
                                    out[at + i] = a[i // 2] >> (16 * (i % 2))
                                else:
                                    out[at + i] = ptx.as_float(a[i])
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
