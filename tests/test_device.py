"""The machinery on a GPU: the hardware's bits, graphs, dependent launches, shared memory, cost.

`pytest -m gpu`. What runs here on CuPy arrays runs elsewhere on numpy arrays by the same calls.
"""

import re
from time import perf_counter

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import driver, ptx
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.kernels.probe import check_device
from ddtree_numba.spec.numerics import BF16, F32

from .gpu_arrays import to_gpu
from .skinny_gemm import skinny_gemm
from .test_lanewise import LANEWISE, applying
from .test_launch import ten_arguments
from .test_ptx import letters, transposed

pytestmark = pytest.mark.gpu

# Units in the last place from the rounded result. rcp: 2^-23 of the value is up to 2 of them.
APPROXIMATE = {"exp2": 4, "rcp": 2}
SPECIAL = [
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000),  # 0, 1, infinite
    *(0x7FC00000, 0xFFC12345, 0x7F800001, 0xFFB1941F),  # NaN, quiet and signalling
    *(0x00000001, 0x807FFFFF, 0x00600000, 0x00800000, 0x7F7FFFFF),  # subnormal, first, last normal
]


@pytest.mark.parametrize("name", LANEWISE)
def test_the_hardware_gives_the_bits_of_the_cpu_executor(name, rng):
    words = rng.integers(0, 1 << 64, (1536, 4), dtype=np.uint64)
    values = rng.standard_normal((512, 4)).astype(F32) * F32.type(8)
    words[512:1024] = values.view(np.uint32)
    words[1024:] = rng.choice(SPECIAL, (512, 4))
    if name == "divide":  # by zero: no result of its own
        words[:, 1] |= np.uint64(1)
    expected, out = np.empty(1536, np.uint64), to_gpu(np.empty(1536, np.uint64))
    made = applying(name)
    made.launch(48, words, expected)
    made.launch(48, to_gpu(words), out)
    got = out.get()
    if letters(name)[0] == "f":
        got, expected = (v.astype(np.uint32).view(F32) for v in (got, expected))
        assert np.array_equal(np.isnan(got), np.isnan(expected)), "NaN has no bits to compare"
        number = ~np.isnan(expected)
        words, got, expected = words[number], got[number], expected[number]
        if name in APPROXIMATE:
            with np.errstate(invalid="ignore"):  # infinities must be equal
                near = np.abs(got - expected) <= APPROXIMATE[name] * np.spacing(np.abs(expected))
            got = np.where(near & (expected != 0), expected, got)
        got, expected = got.view(np.uint32), expected.view(np.uint32)
    (wrong,) = np.nonzero(got != expected)
    first = wrong[:3]
    assert not wrong.size, f"{wrong.size}: {words[first]} give {got[first]}, not {expected[first]}"


def test_a_tensor_core_kernel_agrees_with_the_cpu_executor(rng):
    x = rng.standard_normal((8, 512)).astype(BF16)
    weight = rng.standard_normal((128, 512)).astype(BF16)
    expected, out = np.empty((8, 128), F32), to_gpu(np.empty((8, 128), F32))
    skinny_gemm.launch(2, x, weight, expected, 8)
    skinny_gemm.launch(2, to_gpu(x), to_gpu(weight), out, 8)
    np.testing.assert_allclose(out.get(), expected, rtol=1e-5, atol=1e-4)


def test_ldmatrix_transposes():
    x = np.arange(256, dtype=np.uint16).view(BF16)
    expected, out = np.empty(128, np.uint32), to_gpu(np.empty(128, np.uint32))
    made = Kernel(transposed, threads=32)
    made.launch(1, x, expected)
    made.launch(1, to_gpu(x), out)
    assert np.array_equal(out.get(), expected)


@cuda.jit
def fold(state: update(uint32), step: int32):
    """Each launch needs the one before; any overtaking changes the number."""
    ptx.wait_for_previous()
    ptx.launch_next()
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    state[i] = state[i] * 1664525 + step


@pytest.mark.parametrize("pdl", [False, True])
def test_a_chain_of_1000_launches_is_exact_eager_and_in_a_graph(pdl):
    import cupy

    made = Kernel(fold, threads=256, name=f"fold_{pdl}", pdl=pdl)
    expected = np.arange(1024, dtype=np.uint32)
    for step in range(1000):
        expected = expected * np.uint32(1664525) + np.uint32(step)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        state = cupy.arange(1024, dtype=np.uint32)
        for step in range(1000):
            made.launch(4, state, step)
        stream.synchronize()
        assert np.array_equal(state.get(), expected)
        state[...] = cupy.arange(1024, dtype=np.uint32)
        stream.synchronize()
        stream.begin_capture()
        for step in range(1000):
            made.launch(4, state, step)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(state.get(), expected)


WORDS = 96 * 1024 // 4


@kernel(threads=256, shared_bytes=WORDS * 4)
@cuda.jit
def turned_round(y: write(uint32)):
    shared = cuda.shared.array(0, uint32)
    i = cuda.threadIdx.x
    while i < WORDS:
        shared[i] = i
        i += 256
    cuda.syncthreads()
    i = cuda.threadIdx.x
    while i < WORDS:
        y[i] = shared[WORDS - 1 - i]
        i += 256


def test_n06_96_kilobytes_of_shared_memory():
    out = to_gpu(np.empty(WORDS, np.uint32))
    turned_round.launch(1, out)
    assert np.array_equal(out.get(), np.arange(WORDS)[::-1])


def test_n06_more_shared_memory_than_the_device_has_is_named():
    made = Kernel(turned_round.function, threads=256, shared_bytes=1 << 20, name="greedy")
    with pytest.raises(driver.DeviceError, match="1048576 bytes of dynamic shared"):
        made.launch(1, to_gpu(np.empty(WORDS, np.uint32)))


def test_n01_the_device_is_checked_and_named():
    assert re.match(r".+ \(sm_\d+\), driver of CUDA 1\d\.\d, numba-cuda ", check_device())


def test_numbas_own_launch_takes_the_same_kernel():
    import cupy

    x = cupy.arange(64, dtype=np.float32)
    y = cupy.zeros_like(x)
    body = cuda.jit(doubled.signature)(doubled.body)
    body[1, 64](x.data.ptr, y.data.ptr)
    cupy.cuda.Device().synchronize()
    assert np.array_equal(y.get(), 2 * x.get())


@kernel(threads=64)
@cuda.jit
def doubled(x: read(float32), y: write(float32)):
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x] * float32(2)


def test_a_launch_with_ten_arguments_costs_the_host_6_microseconds(record_property):
    import cupy

    made = Kernel(ten_arguments, threads=32)
    arrays = [cupy.zeros(1, F32) for _ in range(8)]
    stream = cupy.cuda.Stream(non_blocking=True)
    costs = []
    for _ in range(20):
        stream.synchronize()
        start = perf_counter()
        for _ in range(200):
            made.launch(1, *arrays, 0, 0.5, stream=stream.ptr)
        costs.append((perf_counter() - start) / 200)
    best, middle = min(costs) * 1e6, float(np.median(costs)) * 1e6
    record_property("summary", f"launch, 10 arguments: {best:.1f} us, median {middle:.1f}")
    assert best <= 6
