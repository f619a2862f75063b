"""The GPU side of the harness on a made-up CuPy that writes down what it is asked."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from bench import device, roof
from ddtree_numba.kernels import driver, ptx_cpu
from ddtree_numba.spec.numerics import BF16

PROPERTIES = dict(name=b"Made Up", multiProcessorCount=3)


class FakeArray:
    """As much of cupy.ndarray as the harness uses; `data` is its pointer."""

    def __init__(self, host):
        self.held = host
        self.shape, self.dtype, self.nbytes, self.ndim = (
            host.shape,
            host.dtype,
            host.nbytes,
            host.ndim,
        )
        self.data = self
        self.ptr = host.ctypes.data

    def copy(self):
        return FakeArray(self.held.copy())

    def get(self, stream):
        return self.held

    def memset_async(self, value, size, stream):
        assert size == self.nbytes
        self.held.reshape(-1).view(np.uint8)[...] = value

    def copy_from_device_async(self, source, size, stream):
        assert size == self.nbytes == source.nbytes
        self.held[...] = source.held


class FakeCupy:
    """Calls go into `log`; any two events are two milliseconds apart."""

    def __init__(self):
        log = self.log = []

        class Stream:
            ptr = 7

            def __init__(self, non_blocking):
                assert non_blocking, "a blocking stream cannot be captured beside the null stream"

            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

            def begin_capture(self):
                log.append("begin")

            def end_capture(self):
                log.append("end")
                return SimpleNamespace(
                    upload=lambda stream: log.append("upload"),
                    launch=lambda stream: log.append("graph"),
                )

            def synchronize(self):
                log.append("synchronize")

        class Event:
            def record(self, stream):
                log.append("event")

            def synchronize(self):
                log.append("wait")

        runtime = SimpleNamespace(getDeviceProperties=lambda number: PROPERTIES)
        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            runtime=runtime,
            Device=lambda number: SimpleNamespace(use=lambda: None),
            get_elapsed_time=lambda start, stop: 2.0,  # ms
        )

    def asarray(self, host):
        assert host.flags.c_contiguous
        return FakeArray(host.copy())

    def empty(self, shape, dtype):
        return FakeArray(np.zeros(shape, dtype))

    def ones(self, shape, dtype):
        return FakeArray(np.ones(shape, dtype))

    def sum(self, array, out):
        self.log.append("flush")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setattr(driver, "arch_of", lambda number: "sm_90")
    monkeypatch.setattr(driver, "attribute", lambda number, name: {"L2_CACHE_SIZE": 1000}[name])
    monkeypatch.setattr(device, "WARM_SECONDS", 0.0)
    return device.Gpu()


def test_a_replay_is_timed_between_two_events_behind_the_flush(gpu):
    assert gpu.l2_bytes == 1000 and gpu.beyond_l2.nbytes == 2000
    replay = gpu.capture(lambda stream: gpu.cupy.log.append(f"work on {stream.ptr}"))
    assert gpu.seconds(replay) == pytest.approx(2e-3)
    expected = ["begin", "work on 7", "end", "upload", "flush", "event", "graph", "event", "wait"]
    assert gpu.cupy.log == expected


def test_a_capture_ends_when_a_launch_fails(gpu):
    with pytest.raises(ZeroDivisionError):
        gpu.capture(lambda stream: 1 / 0)
    assert gpu.cupy.log == ["begin", "end"]


def test_arrays_go_there_and_come_back(gpu):
    host = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert (gpu.host(gpu.copy(gpu.array(host[:, :2]))) == host[:, :2]).all()
    for place in (gpu, device.Cpu()):
        poison = place.host(place.poisoned(np.zeros((2, 3), BF16)))
        assert poison.shape == (2, 3) and (poison.view(np.uint16) == 0xC5C5).all()
    run = []
    gpu.run(run.append)
    assert run == [gpu.stream] and gpu.cupy.log[-1] == "synchronize"


def test_roofs_come_from_what_is_there(gpu, monkeypatch):
    launched = []
    monkeypatch.setattr(roof, "COPY_BYTES", 1 << 12)
    monkeypatch.setitem(sys.modules, "torch", None)  # not on a made-up stream
    monkeypatch.setattr(roof.empty_kernel, "launch", lambda *a, stream: launched.append(a))
    grids = []
    monkeypatch.setattr(
        roof.mma_kernel, "launch", lambda grid, *a, stream: grids.append((grid, a[-1]))
    )
    found = roof.measure(gpu)
    assert found.copy == pytest.approx(2 * 4096 / 2e-3)
    assert found.step == pytest.approx(2e-3 / roof.LAUNCHES) and found.launch > 0
    assert {len(arguments) for arguments in launched} == {1 + len(roof.empty_kernel.parameters)}
    assert len(roof.empty_kernel.parameters) == 10
    assert set(grids) == {(3 * roof.MMA_BLOCKS, roof.PRODUCTS)}
    warps = 3 * roof.MMA_BLOCKS * roof.MMA_WARPS
    flops = warps * roof.CHAINS * roof.PRODUCTS * 2 * 16 * 8 * 16
    assert found.mma_sync == pytest.approx(flops / 2e-3)
    assert found.mma is None, "the made-up CuPy has no cuBLAS"
    assert found.mma_by.startswith("cuBLAS through CuPy: ") and "PyTorch: " in found.mma_by


def test_the_first_library_that_multiplies_gives_the_rate(gpu, monkeypatch):
    def broken(gpu):
        raise RuntimeError("no\nbfloat16")

    monkeypatch.setattr(roof, "_cublas", broken)
    monkeypatch.setattr(roof, "_torch", lambda gpu: lambda: None)
    assert roof.mma_rate(gpu) == (pytest.approx(2 * roof.SIDE**3 / 2e-3), "PyTorch")
    monkeypatch.setattr(roof, "_torch", broken)
    rate, reasons = roof.mma_rate(gpu)
    assert rate is None and reasons == "cuBLAS through CuPy: no bfloat16; PyTorch: no bfloat16"


def test_an_empty_kernel_is_one_that_compiles():
    compiled = roof.empty_kernel.compile("sm_90")
    assert compiled.registers <= 16 and not compiled.spill_bytes


def test_the_mma_roof_multiplies_in_chains_side_by_side():
    rng = np.random.default_rng(5)
    a, b = rng.integers(-3, 4, (16, 16)), rng.integers(-3, 4, (16, 8))
    lanes = np.empty(32 * 12, BF16)
    lanes[ptx_cpu.A], lanes[ptx_cpu.B] = a, b
    operands = lanes.view(np.uint32).reshape(32, 6).T.copy()
    out = np.zeros(roof.mma_kernel.threads, np.float32)
    roof.mma_kernel.launch(1, operands, out, 3)
    total = (a @ b).reshape(-1)[ptx_cpu.D].sum(axis=1)  # of what a lane holds
    assert (out.reshape(-1, 32) == 3 * roof.CHAINS * total).all()
