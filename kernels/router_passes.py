"""The passes of `router.py`: sums over the columns, and the choice from them."""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.pieces import load16

WARP = 32
ROWS, TOKENS = 16, 8  # of an mma's tile
UNIT = 32  # columns of a row that four lanes load, 16 bytes each
UNITS = 4  # of a piece: with 4 tiles of experts, 128 registers of weights
PIECE = UNIT * UNITS  # columns of a warp: a chain of 8 mma
RUN = 7  # pieces, and warps, of a block: 7,168 columns are 8 runs
STAGES = 4  # token tiles under way
MINUS_LOG2_E = np.float32(-1.4426950408889634)
SMALL = np.float32(1e-20)
NO_NUMBER, NO_EXPERT = 1, 0  # keys below that of -inf


def runs_of(width: int) -> int:
    return -(-width // (PIECE * RUN))


def each_of(experts: int) -> int:
    """Experts of a lane, in 16-byte loads."""
    return -(-experts // (4 * WARP)) * 4


@cache
def make_sums(width: int, experts: int, tiles: int) -> Kernel:
    """Sums over a run of columns, for all tokens; a block has `tiles` tiles of experts."""
    warps = min(RUN, -(-width // PIECE))
    threads, lines = WARP * warps, ROWS * tiles
    groups, padded = -(-experts // lines), WARP * each_of(experts)
    whole = width % (PIECE * warps) == 0
    words, token_words, accumulators = 8 * UNITS * tiles, 4 * UNITS, 4 * tiles
    stride = lines + 4  # floats from token to token in shared memory: lanes meet in no bank
    part = 4 * TOKENS * stride
    slot = 16 * WARP * UNITS
    ring, quads = STAGES * warps * slot, TOKENS * lines // 4

    @cuda.jit(device=True, inline="always")
    def copy(h, token, rows, column, target):
        for u in range(UNITS):
            here = token < rows and (whole or column + UNIT * u < width)
            at = cuda.selp(here, token * width + column + UNIT * u, 0)
            ptx.copy16_part(target + 16 * WARP * u, h, at, cuda.selp(here, int32(16), int32(0)))
        ptx.copy_commit()

    @kernel(
        threads=threads,
        name=f"router_sums_{width}_{experts}_{tiles}",
        shared_bytes=ring + 2 * warps * part,
        registers=35 * tiles + 60,
        opcodes=("HMMA.16816.F32.BF16", "LDG.E.128", "LDGSTS.E.BYPASS"),
        pdl=True,
    )
    @cuda.jit
    def router_sums_kernel(h: read(bf16), gate: read(bf16), sums: write(float32), rows: int32):
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        line, quarter = int32(lane >> 2), int32(lane & 3)
        group, run = cuda.blockIdx.x % groups, cuda.blockIdx.x // groups
        column = int32((run * warps + warp) * PIECE + 8 * quarter)
        weights = cuda.local.array(words, uint32)
        tokens = cuda.local.array(token_words, uint32)
        totals = cuda.local.array(accumulators, float32)
        memory = ptx.shared_address(cuda.shared.array(0, uint32))
        for i in range(2 * tiles):
            expert = min(group * lines + 8 * i + line, experts - 1)
            for u in range(UNITS):
                at = 4 * (UNITS * i + u)
                for n in range(4):
                    weights[at + n] = 0
                if whole or column + UNIT * u < width:
                    load16(gate, expert * width + column + UNIT * u, weights, at)
        ptx.launch_next()
        ptx.wait_for_previous()
        tile, step = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        own = int32(memory + warp * slot + 16 * lane)
        for s in range(STAGES - 1):
            copy(h, TOKENS * (tile + s * step) + line, rows, column, own + s * warps * slot)
        read_slot, buffer = int32(0), int32(0)
        while TOKENS * tile < rows:
            free = int32(read_slot - 1 if read_slot > 0 else STAGES - 1)
            following = TOKENS * (tile + (STAGES - 1) * step) + line
            copy(h, following, rows, column, own + free * (warps * slot))
            ptx.copy_wait(STAGES - 1)
            for u in range(UNITS):
                at = own + read_slot * (warps * slot) + 16 * WARP * u
                a, b, c, d = ptx.lds4(at)
                tokens[4 * u], tokens[4 * u + 1], tokens[4 * u + 2], tokens[4 * u + 3] = a, b, c, d
            parts = int32(memory + ring + buffer * (warps * part))
            for i in range(accumulators):
                totals[i] = float32(0)
            for u in range(UNITS):
                for n in range(0, 4, 2):
                    for r in range(tiles):  # chains side by side
                        a, x, y = 4 * (UNITS * 2 * r + u) + n, 4 * u + n, 4 * r
                        b = a + 4 * UNITS
                        totals[y], totals[y + 1], totals[y + 2], totals[y + 3] = ptx.mma(
                            weights[a],
                            weights[b],
                            weights[a + 1],
                            weights[b + 1],
                            tokens[x],
                            tokens[x + 1],
                            totals[y],
                            totals[y + 1],
                            totals[y + 2],
                            totals[y + 3],
                        )
            for r in range(tiles):
                at = parts + warp * part + 4 * (2 * quarter * stride + ROWS * r + line)
                ptx.sts1_f(at, totals[4 * r])
                ptx.sts1_f(at + 4 * stride, totals[4 * r + 1])
                ptx.sts1_f(at + 32, totals[4 * r + 2])
                ptx.sts1_f(at + 4 * stride + 32, totals[4 * r + 3])
            cuda.syncthreads()
            for begin in range(0, quads, threads):
                i = int32(begin + thread)
                token, expert = int32(i // (lines // 4)), int32(i % (lines // 4) * 4)
                at = parts + 4 * (token * stride + expert)
                token += TOKENS * tile
                if i < quads and token < rows:
                    a, b, c, d = ptx.lds4_f(at)
                    for w in range(1, warps):
                        e, f, g, x = ptx.lds4_f(at + w * part)
                        a, b, c, d = ptx.add(a, e), ptx.add(b, f), ptx.add(c, g), ptx.add(d, x)
                    place = (run * rows + token) * padded + group * lines + expert
                    ptx.stg4_f(sums, place, a, b, c, d)
            read_slot = int32(read_slot + 1 if read_slot < STAGES - 1 else 0)
            buffer = int32(1 - buffer)
            tile = int32(tile + step)

    return router_sums_kernel


@cache
def make_choice(width: int, experts: int) -> Kernel:
    """A warp a row adds up its runs and writes experts and weights.

    Of `nodes` rows that belong together, those beyond `sizes` add up the first one's; 0: all count.
    A lane has neighbouring experts: of equal ones the lowest lane has the lowest id.
    """
    each, runs = each_of(experts), runs_of(width)
    padded = WARP * each

    @kernel(threads=WARP, name=f"router_choice_{width}_{experts}", registers=168, pdl=True)
    @cuda.jit
    def router_choice_kernel(
        sums: read(float32),
        rows: int32,
        bias: read(float32),
        k: int32,
        scaling: float32,
        sizes: read(int32),
        nodes: int32,
        chosen: write(int32),
        weights: write(float32),
    ):
        row, lane = cuda.blockIdx.x, int32(cuda.threadIdx.x)
        first = int32(lane * each)
        biases = cuda.local.array(each, float32)
        logits = cuda.local.array(each, float32)
        scores = cuda.shared.array(padded, float32)
        keys = cuda.local.array(each, uint32)
        greatest = cuda.local.array(each, uint32)
        slots = cuda.local.array(each, int32)
        for n in range(each):
            biases[n] = bias[min(first + n, experts - 1)]
        ptx.launch_next()
        ptx.wait_for_previous()
        source = int32(row)
        if nodes > 0:
            request = int32(ptx.divide(row, nodes))
            if row - request * nodes >= sizes[request]:
                source = int32(request * nodes)
        for n in range(0, each, 4):
            at = source * padded + first + n
            a, b, c, d = ptx.ldg4_f(sums, at)
            for s in range(1, runs):
                e, f, g, h = ptx.ldg4_f(sums, at + s * rows * padded)
                a, b, c, d = ptx.add(a, e), ptx.add(b, f), ptx.add(c, g), ptx.add(d, h)
            logits[n], logits[n + 1], logits[n + 2], logits[n + 3] = a, b, c, d
        for n in range(each):
            score = ptx.rcp(float32(1) + ptx.exp2(logits[n] * MINUS_LOG2_E))
            scores[first + n] = score
            biased = score + biases[n] + float32(0)  # -0 equals +0
            bits = ptx.as_bits(biased)
            key = uint32(bits ^ (uint32(int32(bits) >> 31) | 0x80000000))
            key = cuda.selp(biased == biased, key, uint32(NO_NUMBER))
            keys[n] = cuda.selp(first + n < experts, key, uint32(NO_EXPERT))
        cuda.syncwarp()
        total, picked, i = float32(0), int32(0), int32(0)
        while i < k:
            for n in range(each):
                greatest[n], slots[n] = keys[n], n
            for level in range(5):
                for n in range(0, each - (1 << level), 2 << level):
                    m = n + (1 << level)
                    later = greatest[m] > greatest[n]
                    greatest[n] = cuda.selp(later, greatest[m], greatest[n])
                    slots[n] = cuda.selp(later, slots[m], slots[n])
            top = ptx.redux_max(greatest[0])
            holders = cuda.ballot_sync(0xFFFFFFFF, greatest[0] == top)
            winner = int32(31 - ptx.clz(holders & -holders))
            slot = cuda.selp(winner == lane, slots[0], int32(-1))
            for n in range(each):
                keys[n] = cuda.selp(slot == n, uint32(NO_EXPERT), keys[n])
            expert = int32(ptx.shfl_idx(first + slots[0], winner))
            total = total + scores[expert]
            picked = cuda.selp(lane == i, expert, picked)
            i = int32(i + 1)
        if lane < k:
            chosen[row * k + lane] = picked
            weights[row * k + lane] = scores[picked] / (total + SMALL) * scaling

    return router_choice_kernel
