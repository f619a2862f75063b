"""Split barriers on the CPU executor: who arrives goes on, who waits knows what came before."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.simt_threads import Fault

from .test_simt import SEEDS, run

READY, FREE = 1, 2
ROUNDS = 5


def make(early: bool):
    """One warp hands numbers to another; early: it says so before it has written them."""

    @cuda.jit
    def hands_over(y: write(int32)):
        shared = cuda.shared.array(32, int32)
        lane, k = cuda.threadIdx.x & 31, 0
        while k < ROUNDS:
            if cuda.threadIdx.x < 32:
                if k > 0:
                    ptx.bar_wait(FREE, 64)
                if early:
                    ptx.bar_arrive(READY, 64)
                shared[lane] = 100 * k + lane
                if not early:
                    ptx.bar_arrive(READY, 64)
            else:
                ptx.bar_wait(READY, 64)
                y[32 * k + lane] = shared[lane ^ 1]
                if k + 1 < ROUNDS:
                    ptx.bar_arrive(FREE, 64)
            k += 1

    return hands_over


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_in_two_halves(seed):
    y = np.empty((ROUNDS, 32), np.int32)
    run(make(early=False), y, threads=64, seed=seed)
    assert np.array_equal(y, 100 * np.arange(ROUNDS)[:, None] + (np.arange(32) ^ 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_arriving_too_early_is_seen(seed):
    with pytest.raises(Fault, match="race: shared byte|nothing has written it"):
        run(make(early=True), np.empty((ROUNDS, 32), np.int32), threads=64, seed=seed)


def make_copies(waits: bool):
    """One warp copies to two buffers in turn, another reads them as their phases end."""

    @cuda.jit
    def copies(x: read(uint32), y: write(uint32)):
        data = cuda.shared.array(256, uint32, alignment=16)
        phases = cuda.shared.array(4, uint32, alignment=16)
        at, here = ptx.shared_address(data), ptx.shared_address(phases)
        lane, k = cuda.threadIdx.x & 31, 0
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(here, 32)
            ptx.mbarrier_init(here + 8, 32)
        cuda.syncthreads()
        while k < ROUNDS:
            b = k & 1
            if cuda.threadIdx.x < 32:
                if k > 1:
                    ptx.bar_wait(FREE + b, 64)
                ptx.copy16(at + 512 * b + 16 * lane, x, 128 * k + 4 * lane)
                ptx.copy_arrive(here + 8 * b)
            else:
                while waits and ptx.mbarrier_passed(here + 8 * b, k >> 1 & 1) == 0:
                    pass
                y[32 * k + lane] = data[128 * b + 4 * (31 - lane)]
                if k + 2 < ROUNDS:
                    ptx.bar_arrive(FREE + b, 64)
            k += 1

    return copies


@pytest.mark.parametrize("seed", SEEDS)
def test_phases_of_a_barrier_in_shared_memory(seed):
    x, y = np.arange(ROUNDS * 128, dtype=np.uint32), np.empty((ROUNDS, 32), np.uint32)
    run(make_copies(waits=True), x, y, threads=64, seed=seed)
    assert np.array_equal(y, x.reshape(ROUNDS, 32, 4)[:, ::-1, 0])


@pytest.mark.parametrize("seed", SEEDS)
def test_reading_before_the_phase_has_ended_is_seen(seed):
    x, y = np.arange(ROUNDS * 128, dtype=np.uint32), np.empty((ROUNDS, 32), np.uint32)
    with pytest.raises(Fault, match="race: shared byte|nothing has written|is under way"):
        run(make_copies(waits=False), x, y, threads=64, seed=seed)
