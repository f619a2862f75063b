"""The CPU executor finds every planted fault, in any order of the warps, and says where."""

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.simt_threads import Fault

from . import skinny_gemm
from .test_simt import SEEDS, run, run_gemm, waits_for_ever

SOURCE = Path(skinny_gemm.__file__).read_text()


def mutated(old: str, new: str):
    """The kernel of skinny_gemm.py with one piece of its text replaced."""
    assert SOURCE.count(old) == 1, old
    module = ModuleType("mutated")
    exec(compile(SOURCE.replace(old, new), skinny_gemm.__file__, "exec"), vars(module))
    return module.skinny_gemm


EARLY = "is read while the copy of thread .* is under way"
TWICE = "is written while the copy of thread .* is under way"
RACE = "race: shared byte|nothing has written it"
FAULTS = {
    "no wait for the copies": ("        ptx.copy_wait(STAGES - 2)\n", "", EARLY),
    "wait for one group too few": ("copy_wait(STAGES - 2)", "copy_wait(STAGES - 1)", EARLY),
    "no barrier in the loop": (
        "(STAGES - 2)\n        cuda.syncthreads()\n",
        "(STAGES - 2)\n",
        RACE,
    ),
    "no barrier before the epilogue": ("    cuda.syncthreads()\n    column", "    column", RACE),
    "no barrier behind the epilogue": ("    cuda.syncthreads()\n    i =", "    i =", RACE),
    "the copy overwrites what is read": (
        "if slot > 0 else STAGES - 1",
        "if False else slot",
        EARLY,
    ),
    "the copy goes where another is under way": ("slot - 1 if slot > 0", "1 if slot == 0", TWICE),
    "mma in a branch of some lanes": (
        "            d0, d1, d2, d3 = ptx.mma",
        "            if lane != 3:\n                d0, d1, d2, d3 = ptx.mma",
        "divergent warp operation: lane 3 is in line",
    ),
    "barrier in a branch of some threads": (
        "    cuda.syncthreads()\n    i =",
        "    if lane != 3:\n        cuda.syncthreads()\n    i =",
        f"divergent barrier|deadlock|{RACE}",
    ),
    "a row too far": ("row = line + 16 * n", "row = line + 16 * n + 1", "out of bounds: 16 bytes"),
    "rows not aligned": ("+ 16  # bytes", "+ 8  # bytes", "misaligned: 16 bytes"),
    "fewer bytes of shared memory": ("// 2\n", "// 4\n", "out of bounds: 16 bytes"),
    "array not aligned": (", alignment=16", "", "misaligned: 16 bytes"),
    "write through a read-only pointer": ("        y[row *", "        x[row *", "read-only"),
    "local sum never set": ("d0 = d1 = d2 = d3", "d0 = d1 = d2", "UnboundLocalError"),
}

# In these orders a lane overwrites before another one reads.
SHUFFLED = {"the copy overwrites what is read": RACE}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(name, seed, rng):
    old, new, message = FAULTS[name]
    if seed is not None:
        message = SHUFFLED.get(name, message)
    with pytest.raises(Fault, match=message) as caught:
        run_gemm(mutated(old, new), rng, steps=4, seed=seed)
    where = r"skinny_gemm, skinny_gemm.py:(\d+), block \(0, 0, 0\), thread \d+: "
    line = re.match(where, str(caught.value))
    assert line and 0 < int(line[1]) <= len(SOURCE.splitlines())


def test_wrong_lanes_give_wrong_numbers(rng):
    """What no executor can call a fault shows in the result."""
    y, expected = run_gemm(mutated("(lane & 15)) * STRIDE", "(lane & 7)) * STRIDE"), rng)
    assert not np.allclose(y, expected, rtol=1e-2)


# --- single faults


@cuda.jit
def reads_shared_of_other_lane(y: write(int32), ordered: int32):
    shared = cuda.shared.array(32, int32)
    lane = cuda.threadIdx.x
    shared[lane] = lane
    if ordered:
        cuda.syncwarp()
    y[lane] = shared[31 - lane]


def test_lanes_need_syncwarp():
    y = np.empty(32, np.int32)
    run(reads_shared_of_other_lane, y, 1, threads=32)
    assert np.array_equal(y, np.arange(31, -1, -1))
    with pytest.raises(Fault, match="shared byte|race"):
        run(reads_shared_of_other_lane, y, 0, threads=32)


@cuda.jit
def reads_what_nobody_wrote(y: write(int32)):
    shared = cuda.shared.array(64, int32)
    if cuda.threadIdx.x < 63:
        shared[cuda.threadIdx.x] = 1
    cuda.syncthreads()
    y[cuda.threadIdx.x] = shared[cuda.threadIdx.x]


def test_uninitialised_shared_memory_is_named():
    with pytest.raises(Fault, match="thread 63: shared byte .* nothing has written it"):
        run(reads_what_nobody_wrote, np.empty(64, np.int32))


@cuda.jit
def reads_local_before_assignment(y: write(int32)):
    values = cuda.local.array(4, int32)
    values[0] = 1
    y[cuda.threadIdx.x] = values[1]


def test_uninitialised_local_memory_is_named():
    with pytest.raises(Fault, match="local element 1 is read before it is assigned"):
        run(reads_local_before_assignment, np.empty(64, np.int32))


@cuda.jit
def writes_one_past_the_end(y: write(int32), count: int32):
    if cuda.threadIdx.x <= count:
        y[cuda.threadIdx.x] = 0


def test_out_of_bounds_is_named_with_its_thread():
    where = r"writes_one_past_the_end, test_simt_faults.py:\d+, block \(0, 0, 0\), thread 40"
    with pytest.raises(Fault, match=f"{where}: out of bounds: element 40 of y, which has 40"):
        run(writes_one_past_the_end, np.empty(40, np.int32), 40)


@cuda.jit
def reads_below_zero(x: read(int32), y: write(int32)):
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x - 1]


def test_negative_indices_are_out_of_bounds():
    with pytest.raises(Fault, match="element -1 of x"):
        run(reads_below_zero, np.zeros(64, np.int32), np.empty(64, np.int32))


@cuda.jit
def loads_vectors(x: read(uint32), y: write(uint32)):
    i = cuda.threadIdx.x
    a, b, c, d = ptx.ldg4(x, 4 * i)
    ptx.stg4(y, 4 * i, d, c, b, a)


def test_a_view_may_be_misaligned_for_vectors():
    x = np.arange(256, dtype=np.uint32)
    y = np.empty(256, np.uint32)
    run(loads_vectors, x, y)
    assert np.array_equal(y.reshape(-1, 4), x.reshape(-1, 4)[:, ::-1])
    with pytest.raises(Fault, match="misaligned: 16 bytes at byte 4 of x"):
        run(loads_vectors, np.arange(260, dtype=np.uint32)[1:257], y)


@cuda.jit
def leaves_before_the_barrier(y: write(int32)):
    if cuda.threadIdx.x == 5:
        return
    cuda.syncthreads()
    y[cuda.threadIdx.x] = 1


def test_a_deadlock_is_named():
    with pytest.raises(Fault, match="deadlock: 63 threads wait in lines .*, 1 have returned"):
        run(leaves_before_the_barrier, np.empty(64, np.int32))


@cuda.jit
def two_barriers(y: write(int32)):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    else:
        cuda.syncthreads()
    y[cuda.threadIdx.x] = 1


def test_different_barriers_do_not_meet():
    with pytest.raises(Fault, match="divergent barrier"):
        run(two_barriers, np.empty(64, np.int32))


def test_polling_in_vain_is_named():
    with pytest.raises(Fault, match="waits_for_ever, .*: polls memory that nobody writes"):
        run(waits_for_ever, np.zeros(1, np.uint32), threads=32)


@cuda.jit
def too_much_shared(y: write(int32)):
    cuda.shared.array(25_345, int32)


def test_shared_memory_beyond_99_kilobytes_is_refused():
    with pytest.raises(Fault, match="the limit is 101376"):
        run(too_much_shared, np.empty(1, np.int32))


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="y: dtype float64, the kernel takes int32"):
        run(reads_what_nobody_wrote, np.zeros(64))
    with pytest.raises(TypeError, match="takes 1 arguments, got 2"):
        run(reads_what_nobody_wrote, np.zeros(64, np.int32), 3)
    with pytest.raises(ValueError, match="2048 threads a block"):
        run(reads_what_nobody_wrote, np.zeros(64, np.int32), threads=2048)
