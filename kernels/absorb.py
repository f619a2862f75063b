"""The two head-wise products of absorbed MLA on the device; see `spec/absorb.py`.

A warp holds 64 x 64 of a head's matrix in registers, as operand A of the mma, and lets the tokens
pass, eight at a time; the warps of a block are the slices of `a`, whose sums are added in order.

A matrix lies with b contiguous where an operand wants two neighbours of `a` in a register. Lane
4 g + t reads 16 bytes, b = 8 g to 8 g + 7, of eight rows, a = 8 t to 8 t + 7 of 32, and exchanges
halves between rows: each register then is one b and two a. It takes no shared memory, and row g of
mma j is b = 8 g + 2 j, row g + 8 the b behind it, so that a lane's sums are eight neighbours too.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.rope import make_turn
from ddtree_numba.kernels.vector import WIDTH
from ddtree_numba.spec.numerics import BF16

WARP = 32
SIDE = 64  # of what a warp holds; also the length of a slice, whatever the matrix
STEP, STEPS = 32, SIDE // 32
WORDS = SIDE * SIDE // 2 // WARP
SUMS = 16
SLICES = 16  # at most: a block of 512 threads
PAD = SIDE + 4  # floats of a token's sums in shared memory
CELLS = 8 * PAD
LOW, HIGH = 0x5410, 0x7632  # the lower, the upper halves of two words
FEW, MANY = 16, 64  # tokens of a block: more blocks, or fewer reads of the matrix


@cuda.jit(device=True, inline="always")
def fetch_tokens(x, place, here, ins, b):
    """A token's 16 bytes of every step, or zeros."""
    for s in range(STEPS):
        if here and s * STEP < ins:
            b[4 * s], b[4 * s + 1], b[4 * s + 2], b[4 * s + 3] = ptx.ldg4(x, place + s * STEP)
        else:
            for i in range(4):
                b[4 * s + i] = uint32(0)


@cache
def make(slices: int, turned: int = 0) -> Kernel:
    """turned: columns behind those of the product that further blocks rotate; see `absorb_rope`."""
    threads = WARP * slices
    pieces = turned // WIDTH
    lines = threads // max(pieces, 1)
    turn = make_turn(bf16, turned) if turned else None
    cells = 2 * slices * CELLS

    @kernel(
        threads=threads,
        name=f"absorb_{slices}" + f"_rope_{turned}" * (turned > 0),
        registers=160,
        opcodes=("HMMA.16816.F32.BF16", "LDG.E.128", "PRMT"),
        shared_bytes=4 * cells,
        pdl=True,
    )
    @cuda.jit
    def absorb_kernel(
        x: read(bf16),
        x_token: int64,
        x_head: int64,
        weight: read(bf16),
        out: write(bf16),
        out_token: int64,
        out_head: int64,
        tokens: int32,
        ins: int32,
        outs: int32,
        each: int32,
        positions: read(int32),
        table: read(float32),
        known: int32,
    ):
        if turned:
            block = int32(cuda.blockIdx.x - (outs + SIDE - 1) // SIDE)
            if block >= 0:
                line, piece = cuda.threadIdx.x // pieces, cuda.threadIdx.x % pieces
                row = block * lines + line
                token = int64(cuda.blockIdx.z) * each + row
                ptx.launch_next()
                ptx.wait_for_previous()
                if line < lines and row < each and token < tokens:
                    at = token * x_token + cuda.blockIdx.y * x_head + ins + piece * WIDTH
                    to = token * out_token + cuda.blockIdx.y * out_head + outs + piece * WIDTH
                    turn(x, at, positions, token, table, known, piece * WIDTH // 2, out, to)
                return
        shared = cuda.shared.array(0, float32)
        base = ptx.shared_address(shared)
        lane, part = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        head, first = cuda.blockIdx.y, cuda.blockIdx.x * SIDE
        row, column = int32(part * SIDE + (lane & 3) * 8), int32(first + (lane >> 2) * 8)

        a = cuda.local.array(WORDS, uint32)
        place = (head * ins + row) * outs + column
        for s in range(STEPS):
            if row + s * STEP < ins and column < outs:
                for i in range(8):
                    n = (s * 8 + i) * 4
                    a[n], a[n + 1], a[n + 2], a[n + 3] = ptx.ldg4_once(
                        weight, place + (s * STEP + i) * outs
                    )
            else:
                for i in range(32):
                    a[s * 32 + i] = uint32(0)

        ptx.launch_next()
        ptx.wait_for_previous()
        token = int32(cuda.blockIdx.z * each)
        end = min(int32(token + each), tokens)
        place = (token + (lane >> 2)) * x_token + head * x_head + row
        b = cuda.local.array(8, uint32)
        fetch_tokens(x, place, token + (lane >> 2) < tokens, ins - row, b)

        for n in range(0, WORDS, 8):
            for i in range(n, n + 4):
                low, high = a[i], a[i + 4]
                a[i], a[i + 4] = ptx.prmt(low, high, LOW), ptx.prmt(low, high, HIGH)

        sums = cuda.local.array(SUMS, float32)
        buffer = int32(0)
        while token < end:
            for i in range(SUMS):
                sums[i] = float32(0)
            for s in range(STEPS):
                for half in range(2):
                    for j in range(4):
                        n, m = (s * 2 + half) * 16 + j, 4 * j
                        sums[m], sums[m + 1], sums[m + 2], sums[m + 3] = ptx.mma(
                            *(a[n], a[n + 4], a[n + 8], a[n + 12]),
                            *(b[4 * s + 2 * half], b[4 * s + 2 * half + 1]),
                            *(sums[m], sums[m + 1], sums[m + 2], sums[m + 3]),
                        )
            place += 8 * x_token
            if token + 8 < end:
                fetch_tokens(x, place, token + 8 + (lane >> 2) < tokens, ins - row, b)
            mine = base + 4 * ((buffer * slices + part) * CELLS + (lane >> 2) * 8)
            for n in range(2):
                cell = mine + 4 * PAD * (2 * (lane & 3) + n)
                ptx.sts4_f(cell, sums[n], sums[n + 2], sums[n + 4], sums[n + 6])
                ptx.sts4_f(cell + 16, sums[n + 8], sums[n + 10], sums[n + 12], sums[n + 14])
            cuda.syncthreads()
            pair = int32(cuda.threadIdx.x)
            while pair < 8 * SIDE // 2:
                line, to = pair // (SIDE // 2), pair % (SIDE // 2) * 2
                cell = base + 4 * (buffer * slices * CELLS + line * PAD + to)
                first_sum, second_sum = ptx.lds2_f(cell)
                for n in range(1, slices):
                    more, other = ptx.lds2_f(cell + 4 * CELLS * n)
                    first_sum, second_sum = ptx.add(first_sum, more), ptx.add(second_sum, other)
                if token + line < tokens and first + to < outs:
                    at = (token + line) * out_token + head * out_head + first + to
                    ptx.stg1(out, at, ptx.pack_bf16(second_sum, first_sum))
                pair = int32(pair + threads)
            buffer = int32(1 - buffer)
            token = int32(token + 8)

    return absorb_kernel


def steps_of(name: str, array) -> tuple[int, int]:
    """Elements from a token to the next and from a head to the next; both may lie apart."""
    token, head, one = (step // array.itemsize for step in array.strides)
    if array.dtype != BF16:
        raise ValueError(f"{name}: dtype {array.dtype}, expected bfloat16")
    if array.size and (one != 1 or token % 8 or head % 8 or min(token, head) < 0):
        raise ValueError(f"{name}: strides {array.strides}, expected rows at multiples of 16 bytes")
    return token, head


def shape_of(weight) -> tuple[int, int, int]:
    """heads, ins, outs of a weight that the kernel takes."""
    heads, ins, outs = weight.shape
    require("weight", weight, (heads, ins, outs), BF16)
    if ins % 8 or outs % 8 or not 0 < ins <= SIDE * SLICES:
        most = SIDE * SLICES
        raise ValueError(f"weight {weight.shape}: expected multiples of 8, at most {most} in")
    return heads, ins, outs


def tokens_each(tokens: int) -> int:
    """Tokens of a block."""
    return FEW if tokens <= 8 * FEW else MANY


def absorb(x, weight, *, out, stream=None):
    """out[t, h] = x[t, h] times weight[h]; returns out. Rows of x and out may lie apart."""
    heads, ins, outs = shape_of(weight)
    tokens = x.shape[0]
    if tuple(x.shape[1:]) != (heads, ins) or tuple(out.shape) != (tokens, heads, outs):
        raise ValueError(f"weight {weight.shape} does not fit x {x.shape} and out {out.shape}")
    each = tokens_each(tokens)
    make(-(-ins // SIDE)).launch(
        (-(-outs // SIDE), heads, -(-tokens // each)),
        *(x, *steps_of("x", x), weight, out, *steps_of("out", out)),
        *(tokens, ins, outs, each, None, None, 0),
        stream=stream,
    )
    return out


def instances() -> list[Kernel]:
    """Outputs of K2.6 and of the embedded model; queries, without and with their rotation."""
    return [make(slices) for slices in (2, 8, 1)] + [make(2, 64), make(1, 16)]
