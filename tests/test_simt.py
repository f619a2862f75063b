"""The CPU executor gives what a GPU would; test_simt_faults.py has what it refuses."""

from contextlib import nullcontext
from time import process_time

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx, simt
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.spec.numerics import BF16, F32

from .skinny_gemm import skinny_gemm

SEEDS = [None, 1, 2]


def run(function, *arguments, threads=64, grid=1, seed=None, **options):
    with nullcontext() if seed is None else simt.shuffled(seed):
        simt.run(function, grid, threads, arguments, **options)


def run_gemm(kernel, rng, steps=5, blocks=1, seed=None):
    """(result, expected) on random operands."""
    x = rng.standard_normal((8, 64 * steps)).astype(BF16)
    weight = rng.standard_normal((64 * blocks, 64 * steps)).astype(BF16)
    y = np.empty((8, 64 * blocks), F32)
    run(kernel, x, weight, y, steps, grid=blocks, threads=128, seed=seed)
    return y, x.astype(np.float64) @ weight.astype(np.float64).T


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_pipelined_tensor_core_kernel_is_right(steps, seed, rng):
    y, expected = run_gemm(skinny_gemm, rng, steps, blocks=2, seed=seed)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


@cuda.jit
def waits_for_ever(flag: update(uint32)):
    while ptx.ld_acquire(flag, 0) == 0:
        pass


@cuda.jit
def passes_a_baton(flags: update(uint32), y: write(int32)):
    """Block i waits for block i + 1: all must be resident at once."""
    block = cuda.blockIdx.x
    if cuda.threadIdx.x == 0 and block + 1 < cuda.gridDim.x:
        while ptx.ld_acquire(flags, block + 1) == 0:
            pass
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        y[block] = block
        ptx.st_release(flags, block, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_wait_for_each_other_run_together(seed):
    y = np.empty(5, np.int32)
    run(passes_a_baton, np.zeros(5, np.uint32), y, grid=5, seed=seed)
    assert np.array_equal(y, np.arange(5))


def test_launches_that_wait_for_each_other_run_together():
    flags, y = np.zeros(2, np.uint32), np.empty(2, np.int32)
    one = simt.Launch(waits_for_ever, 1, 32, (flags,))
    other = simt.Launch(passes_a_baton, 2, 32, (flags, y))
    simt.run_together([one, other])
    assert flags.all()


@cuda.jit
def warp_operations(y: write(int32)):
    lane = cuda.laneid
    y[lane] = cuda.shfl_up_sync(0xFFFFFFFF, lane, 1)
    y[32 + lane] = cuda.shfl_xor_sync(0xFFFFFFFF, lane, 5)
    y[64 + lane] = cuda.ballot_sync(0xFFFFFFFF, lane & 1) & 0xF
    y[96 + lane] = cuda.match_any_sync(0xFFFFFFFF, lane >> 4) == 0xFFFF
    y[128 + lane] = ptx.redux_add(lane)
    if lane < 16:
        y[160 + lane] = cuda.shfl_sync(0xFFFF, lane, 3)
    else:
        y[160 + lane] = cuda.shfl_sync(0xFFFF0000, lane, 20)


def test_warp_operations_give_what_cuda_gives():
    y = np.empty(192, np.int32)
    run(warp_operations, y, threads=32)
    lane = np.arange(32)
    expected = [np.maximum(lane - 1, 0), lane ^ 5, lane * 0 + 10, lane < 16, lane * 0 + 496]
    expected.append(np.where(lane < 16, 3, 20))
    assert np.array_equal(y.reshape(6, 32), expected)


@cuda.jit
def counts(total: update(int32), shared_total: write(int32)):
    local = cuda.shared.array(1, int32)
    if cuda.threadIdx.x == 0:
        local[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(local, 0, cuda.threadIdx.x)
    ptx.atom_add(total, 0, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        shared_total[cuda.blockIdx.x] = local[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_are_no_race(seed):
    total, shared = np.zeros(1, np.int32), np.empty(3, np.int32)
    run(counts, total, shared, grid=3, seed=seed)
    assert total[0] == 192 and shared.tolist() == [2016] * 3


@cuda.jit
def arrives(places: write(int32)):
    """Each thread's place in the order in which its block's threads come."""
    count = cuda.shared.array(1, int32)
    if cuda.threadIdx.x == 0:
        count[0] = 0
    cuda.syncthreads()
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    places[i] = cuda.atomic.add(count, 0, 1)


def test_a_seed_shuffles_lanes_and_warps_in_each_block_anew():
    orders = []
    for _ in range(2):
        with simt.shuffled(3):
            places = np.empty(3 * 64, np.int32)
            run(arrives, places, grid=3)
            orders.append(places.reshape(3, 64))
    one, other = orders
    assert np.array_equal(one, other), "a seed is one order"
    assert (np.sort(one) == np.arange(64)).all() and len({tuple(block) for block in one}) == 3
    assert {tuple(block < 32) for block in one[:, ::32]} == {(True, False), (False, True)}
    assert all((np.diff(block[:32]) < 0).any() for block in one)
    run(arrives, places, grid=3)
    assert (places.reshape(3, 64) == np.arange(64)).all()


@cuda.jit
def writes_half(y: write(float32), z: write(int32)):
    if cuda.threadIdx.x < 32:
        y[cuda.threadIdx.x] = 0


def test_outputs_are_poisoned():
    y, z = np.zeros(64, F32), np.zeros(4, np.int32)
    run(writes_half, y, z)
    assert not y[:32].any() and np.isnan(y[32:]).all()
    assert (z.view(np.uint8) == 0xCD).all()


@cuda.jit
def chain_of_mma(x: read(uint32), y: write(float32)):
    i = 4 * (cuda.threadIdx.x & 31)
    a, b, c, d = ptx.ldg4(x, i)
    d0 = d1 = d2 = d3 = float32(0)
    for _ in range(64):
        d0, d1, d2, d3 = ptx.mma(a, b, c, d, a, b, d0, d1, d2, d3)
    y[cuda.threadIdx.x] = d0


def test_64_chained_mma_of_four_warps_are_quick(record_property):
    x, y = np.zeros(128, np.uint32), np.empty(128, F32)
    run(chain_of_mma, x, y, threads=128)
    start = process_time()
    run(chain_of_mma, x, y, threads=128)
    seconds = process_time() - start
    record_property("summary", f"CPU executor: 128 threads, 64 mma each: {seconds:.2f} s")
    assert seconds < 0.5  # about 0.1 of processor time
