"""Launching on a made-up device: packed arguments, shared memory, errors in one line."""

import ctypes
import struct
import subprocess
import sys
import threading
from pathlib import Path
from time import process_time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, float32, int32, int64, uint8

from ddtree_numba.kernels import cache, driver
from ddtree_numba.kernels.arguments import bf16, read, update, write
from ddtree_numba.kernels.compile import Compiled
from ddtree_numba.kernels.driver import DeviceError
from ddtree_numba.kernels.launch import Kernel, kernel

from .fake_driver import Attribute, Configuration, FakeDriver, unpacked


@cuda.jit
def scaled(x: read(float32), y: write(float32), count: int32, factor: float32):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        y[i] = x[i] * factor


@pytest.fixture(autouse=True)
def another_machine(tmp_path, monkeypatch):
    """An empty cache; nothing remembered of a device."""
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    driver.require_driver.cache_clear()
    driver.arch_of.cache_clear()


@pytest.mark.parametrize(
    "machine, message",
    [
        (dict(missing=True), "no NVIDIA driver found .*; backend numpy needs none"),
        (dict(version=12040), r"too old, .* CUDA 13.0 \(driver of CUDA 12.4, numba-cuda .*580"),
        (dict(count=-1), "no usable NVIDIA device .*cuInit.*; check nvidia-smi"),
        (dict(count=0), "no NVIDIA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (dict(arch=(8, 0)), "device 0 is sm_80, the kernels need sm_90 or newer"),
    ],
)
def test_n01_an_unusable_machine_is_named_in_one_line(machine, message, monkeypatch):
    fake = FakeDriver(**machine)
    monkeypatch.setattr(driver, "api", lambda: fake)
    with pytest.raises(DeviceError, match=message) as caught:
        driver.arch_of(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("static", [0, 4])
@pytest.mark.parametrize("size", [0, 49151, 49152, 49153, 73728, 101376 - 1024, 101376, 101377])
def test_n06_dynamic_shared_memory_up_to_the_devices_limit(size, static, fake):
    made = Compiled("tile", "sm_120", b"", 32, static, 0, 0)
    loaded = driver.Loaded(made, ["i"], 128, shared=size)
    if size + static <= 101376:
        loaded.allow_shared(0)
        assert fake.allowed == {"tile": size}, "opted in whatever the size"
        assert fake.divided == {"tile": driver.DIVISION}, "the same for every kernel"
    else:
        message = f"tile: {size} bytes of dynamic shared memory requested, {101376 - static} avail"
        with pytest.raises(DeviceError, match=message):
            loaded.allow_shared(0)


@pytest.fixture
def fake(monkeypatch):
    """A usable machine without a GPU."""
    made = FakeDriver()
    monkeypatch.setattr(driver, "api", lambda: made)
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "load_function", made.load_function)
    monkeypatch.setattr(driver, "launch_function", lambda: made.cuLaunchKernelEx)
    return made


def array_at(address):
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


@cuda.jit
def many(
    a: read(bf16), b: read(float32), c: write(uint8), d: update(int32), n: int32, m: int64,
    f: float32,
):  # fmt: skip
    c[n] = uint8(a[m])


def test_arguments_are_packed_as_the_kernel_reads_them(fake):
    made = Kernel(many, threads=96, shared_bytes=2048)
    made.launch((5, 2), array_at(2**40), 2**41, None, array_at(64), -3, 2**40, 0.5, stream=77)
    arrays = [array_at(i) for i in (1, 2, 3, 4)]
    made.launch(7, *arrays, np.int32(5), np.int64(6), np.float32(7), stream=78)
    (one, name, parameters), (two, _, _) = fake.launches
    assert name == "many" and fake.allowed == {"many": 2048}
    assert unpacked(parameters, "QQQQiqf") == [1, 2, 3, 4, 5, 6, 7.0]
    assert (one.gridDimX, one.gridDimY, one.gridDimZ, one.hStream) == (5, 2, 1, 77)
    assert (two.gridDimX, two.gridDimY, two.blockDimX, two.sharedMemBytes) == (7, 1, 96, 2048)
    assert (one.blockDimX, one.blockDimY, one.blockDimZ, one.numAttrs) == (96, 1, 1, 0)


def test_the_configuration_lies_as_the_drivers_header_says():
    """Against the bindings' own structure, byte for byte."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    attribute, config = bindings.CUlaunchAttribute(), bindings.CUlaunchConfig()
    kinds = bindings.CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 3, 4
    config.blockDimX, config.blockDimY, config.blockDimZ = 5, 6, 7
    config.sharedMemBytes, config.hStream = 8, bindings.CUstream(2**40)
    config.attrs, config.numAttrs = [attribute], 1
    attributes = Configuration.from_address(config.getPtr()).attrs
    packed = struct.pack(
        driver.CONFIGURATION, 2, 3, 4, 5, 6, 7, 8, 2**40, ctypes.addressof(attributes.contents), 1
    )
    assert packed == ctypes.string_at(config.getPtr(), len(packed)) and len(packed) == 56
    serial = driver.serial_attribute().raw[:-1]
    assert serial == ctypes.string_at(attributes, ctypes.sizeof(Attribute))


def test_programmatic_dependent_launch_is_an_option(fake):
    made = Kernel(scaled, threads=64, pdl=True)
    made.launch(1, 1, 2, 3, 4.0, stream=0)
    configuration = fake.launches[0][0]
    assert configuration.numAttrs == 1
    assert (configuration.attrs[0].id, configuration.attrs[0].value[0]) == (6, 1)


def test_a_kernel_may_have_no_parameters(fake):
    made = Kernel(cuda.jit(lambda: None), threads=32, name="idle")
    for _ in range(2):
        made.launch(3, stream=5)
    assert [(one.gridDimX, one.hStream, name) for one, name, _ in fake.launches] == [
        (3, 5, "idle")
    ] * 2


def test_an_empty_grid_launches_nothing(fake):
    Kernel(scaled, threads=64).launch((4, 0), 1, 2, 3, 4.0, stream=0)
    Kernel(scaled, threads=64).launch(0, np.zeros(0, np.float32), np.zeros(0, np.float32), 0, 1.0)
    assert not fake.launches


def test_threads_do_not_share_the_memory_of_a_launch(fake):
    """The driver is entered with the arguments of its own launch, however threads interleave."""
    made, seen = Kernel(scaled, threads=64), []
    made.launch(1, 0, 0, 0, 0.0, stream=0)
    inside = threading.Barrier(4)

    def slow(configuration, function, parameters, extra) -> int:
        before = unpacked(parameters.value, "QQif")
        inside.wait()
        seen.append((before, unpacked(parameters.value, "QQif")))
        return 0

    made.load().start.__globals__["launch"] = slow
    workers = [
        threading.Thread(
            target=made.launch, args=(1, array_at(i), None, i, 0.5), kwargs=dict(stream=0)
        )
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(seen) == [([i, 0, i, 0.5],) * 2 for i in range(4)]


def test_a_failed_launch_is_named(fake):
    fake.status = 1
    made = Kernel(scaled, threads=64)
    for _ in range(2):  # the first launch loads
        with pytest.raises(DeviceError, match="scaled: launch failed, CUDA_ERROR_INVALID_VALUE, g"):
            made.launch(1, array_at(1), array_at(2), 3, 4.0, stream=0)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ((1, 2), r"scaled: 2 arguments for \(x, y, count, factor\)"),
        ((1, 2, 3, 4.0, 5), r"scaled: 5 arguments for \(x, y, count, factor\)"),
        (("x", 2, 3, 4.0), "scaled: x: str is no array"),
        ((1, 2, 3.5, 4.0), "scaled: count: 3.5: required argument is not an integer"),
        ((1, 2, 2**31, 4.0), "scaled: count: 2147483648: .*2147483647"),
        ((1, 2, 3, None), "scaled: factor: None: required argument is not a float"),
    ],
)
def test_wrong_arguments_are_named(loaded, arguments, message, fake):
    made = Kernel(scaled, threads=64)
    if loaded:
        made.launch(1, array_at(1), array_at(2), 3, 4.0, stream=0)
    with pytest.raises(TypeError, match=message):
        made.launch(1, *arguments, stream=0)
    assert len(fake.launches) == loaded


def test_arrays_of_numpy_and_cupy_do_not_mix(fake):
    with pytest.raises(TypeError, match="scaled: numpy arrays beside others"):
        Kernel(scaled, threads=64).launch(1, np.zeros(3, np.float32), array_at(2), 3, 4.0, stream=0)


def test_parameters_need_types():
    def untyped(x, y: int32):
        pass

    with pytest.raises(TypeError, match="untyped: parameter x has no type"):
        kernel(threads=32)(untyped)


def test_packing_costs_little(fake, monkeypatch, record_property):
    """Ten arguments, four of them absent; the driver's own 3 us come on top, see test_device.py."""
    monkeypatch.setattr(driver, "launch_function", lambda: ctypes.CDLL(None).strnlen)  # 0
    made = Kernel(ten_arguments, threads=32)
    arguments = [array_at(i) if i % 2 else None for i in range(8)] + [3, 0.5]
    made.launch(1, *arguments, stream=0)
    costs = []
    for _ in range(20):
        start = process_time()
        for _ in range(500):
            made.launch(1, *arguments, stream=0)
        costs.append((process_time() - start) / 500)
    best = min(costs) * 1e6
    record_property("summary", f"launch with 10 arguments: {best:.1f} us before the driver")
    assert best < 6


@cuda.jit
def ten_arguments(
    a: read(float32), b: read(float32), c: read(float32), d: read(float32), e: read(float32),
    f: read(float32), g: read(float32), h: write(float32), n: int32, x: float32,
):  # fmt: skip
    h[n] = a[0] + x


def test_numpy_arrays_run_on_the_cpu(rng):
    x = rng.standard_normal(100).astype(np.float32)
    y = np.empty_like(x)
    Kernel(scaled, threads=32).launch(4, x, y, 100, 3)
    assert np.array_equal(y, x * np.float32(3))


def test_the_numpy_backend_needs_neither_numba_nor_cupy():
    program = (
        "import sys; import ddtree_numba.generate; from ddtree_numba.engine import Engine; "
        "Engine.load(backend='numpy'); "
        "sys.exit({'numba', 'cupy', 'cuda', 'greenlet'} & set(sys.modules) or 0)"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
