"""Launching: the cache on disk, the packed launch, shared memory, and errors in one line."""

import multiprocessing
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, float32, int32, int64, uint8

from ddtree_numba.kernels import cache, driver, launch, ptx
from ddtree_numba.kernels import compile as compiling
from ddtree_numba.kernels.arguments import bf16, read, update, write
from ddtree_numba.kernels.compile import Compiled, CompileError
from ddtree_numba.kernels.driver import DeviceError
from ddtree_numba.kernels.launch import Kernel, kernel

from .fake_driver import FakeDriver, Status, unpacked


@cuda.jit
def scaled(x: read(float32), y: write(float32), count: int32, factor: float32):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        y[i] = x[i] * factor


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache; nothing remembered of another machine."""
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    driver.require_driver.cache_clear()
    driver.arch_of.cache_clear()
    cache._told.clear()
    return tmp_path / "cache"


@pytest.fixture
def links(monkeypatch):
    """Names of the kernels that were linked rather than read from disk."""
    names = []

    def counting(ptx_text, name, arch, registers=None):
        names.append(f"{name} {arch}")
        return compiling.link(ptx_text, name, arch, registers)

    monkeypatch.setattr(launch, "link", counting)
    return names


# --- the cache


def test_n04_a_second_start_compiles_nothing(links, folder):
    first = Kernel(scaled, threads=64).compile("sm_120")
    second = Kernel(scaled, threads=64).compile("sm_120")
    assert first == second and links == ["scaled sm_120"]
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


TEXT = """
def make(constant):
    @cuda.jit(device=True, inline="always")
    def shifted(value):
        return value + float32(1)

    @cuda.jit
    def body(x: read(float32), y: write(float32)):
        y[0] = ptx.fma(shifted(x[0]), constant, float32(2))

    return body
"""


def key_of(text=TEXT, constant=3, **options):
    space = dict(cuda=cuda, ptx=ptx, float32=float32, read=read, write=write)
    exec(text, space)
    return cache.key(space["make"](np.float32(constant)).py_func, **options)


def test_n04_a_reformatted_file_stays_valid():
    commented = "\n\n# moved\n" + TEXT.replace(
        "    return body", "    # a comment\n    return body"
    )
    assert key_of(commented) == key_of()


@pytest.mark.parametrize(
    "change",
    [
        dict(text=TEXT.replace("float32(2)", "float32(4)")),
        dict(text=TEXT.replace("value + float32(1)", "value - float32(1)")),
        dict(text=TEXT.replace("ptx.fma", "ptx.fmaf")),
        dict(constant=5),
        dict(arch="sm_90"),
        dict(launch_bounds=(64, 2)),
    ],
)
def test_n04_what_shapes_the_code_changes_the_key(change, monkeypatch):
    monkeypatch.setattr(ptx, "fmaf", ptx.sub, raising=False)
    assert key_of(**change) != key_of()


def test_n04_another_version_compiles_again(links, monkeypatch):
    Kernel(scaled, threads=64).compile("sm_120")
    monkeypatch.setattr(cache, "versions", lambda: {"numba-cuda": "99"})
    Kernel(scaled, threads=64).compile("sm_120")
    assert len(links) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: b"", lambda data: b"{}\n"])
def test_n04_a_damaged_file_is_made_again(damage, links, folder):
    first = Kernel(scaled, threads=64).compile("sm_120")
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = Kernel(scaled, threads=64).compile("sm_120")
    assert again.registers == first.registers
    assert len(links) == 2 and cache._load(path) == again


def test_n04_a_folder_that_cannot_be_written_costs_one_note(tmp_path, monkeypatch, links, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    assert Kernel(scaled, threads=64).compile("sm_120").cubin
    assert Kernel(scaled, threads=64).compile("sm_120").cubin
    (record,) = caplog.records
    assert "compiled kernels are not kept" in record.getMessage() and len(links) == 2


def registers_of_scaled(_) -> int:
    return Kernel(scaled, threads=64).compile("sm_120").registers


def test_n04_eight_processes_may_start_at_once(folder):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(8) as pool:
        found = pool.map(registers_of_scaled, range(8), chunksize=1)
    assert len(set(found)) == 1
    (path,) = folder.iterdir()
    assert cache._load(path) is not None


# --- compiling


def test_an_unknown_architecture_is_named():
    with pytest.raises(CompileError, match="architecture 'ampere' is not of the form sm_90"):
        Kernel(scaled, threads=64).compile("ampere")


def test_n01_a_linker_error_names_kernel_architecture_and_versions(monkeypatch):
    import cuda.core

    def refuse(*given, **options):
        raise RuntimeError("Unsupported .version 9.5;\n current version is '9.0'")

    monkeypatch.setattr(cuda.core, "Linker", refuse)
    with pytest.raises(CompileError) as caught:
        Kernel(scaled, threads=64).compile("sm_120")
    message = str(caught.value)
    assert message.startswith("scaled: cannot link for sm_120 (numba ") and "\n" not in message
    assert "nvidia-nvjitlink" in message and "Unsupported .version 9.5" in message


def test_n01_newer_ptx_is_marked_as_what_the_driver_reads():
    text = ".version 9.5\n.target sm_90\n.visible .entry _Z3abc(\n"
    assert compiling.readable(text, "name") == (
        ".version 9.0\n.target sm_90\n.visible .entry name(\n"
    )
    assert ".version 8.0" in compiling.readable(text.replace("9.5", "8.0"), "name")


# --- the device


@pytest.mark.parametrize(
    "machine, message",
    [
        (dict(missing=True), "no NVIDIA driver found .*; backend numpy needs none"),
        (dict(version=12040), r"supports CUDA 12.4, the kernels need 13.0 \(numba-cuda .*580"),
        (dict(count=-1), "no usable NVIDIA device .*cuInit.*; check nvidia-smi"),
        (dict(count=0), "no NVIDIA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (dict(arch=(7, 5)), "device 0 is sm_75, the kernels need sm_80 or newer"),
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
    monkeypatch.setattr(driver, "load_function", lambda compiled: (None, compiled.name))
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
    assert not hasattr(one, "attrs")


def test_programmatic_dependent_launch_is_an_option(fake):
    Kernel(scaled, threads=64, pdl=True).launch(1, 1, 2, 3, 4.0, stream=0)
    configuration = fake.launches[0][0]
    assert configuration.numAttrs == 1
    assert configuration.attrs[0].value.programmaticStreamSerializationAllowed == 1


def test_an_empty_grid_launches_nothing(fake):
    Kernel(scaled, threads=64).launch((4, 0), 1, 2, 3, 4.0, stream=0)
    Kernel(scaled, threads=64).launch(0, np.zeros(0, np.float32), np.zeros(0, np.float32), 0, 1.0)
    assert not fake.launches


def test_a_failed_launch_is_named(fake):
    fake.status = Status(1)
    with pytest.raises(DeviceError, match="scaled: launch failed, CUDA_ERROR_INVALID_VALUE, grid"):
        Kernel(scaled, threads=64).launch(1, 1, 2, 3, 4.0, stream=0)


def test_a_wrong_number_of_arguments_is_named(fake):
    with pytest.raises(TypeError, match=r"scaled: 2 arguments for \(x, y, count, factor\)"):
        Kernel(scaled, threads=64).launch(1, 1, 2, stream=0)


def test_arrays_of_numpy_and_cupy_do_not_mix(fake):
    with pytest.raises(TypeError, match="scaled: numpy arrays beside others"):
        Kernel(scaled, threads=64).launch(1, np.zeros(3, np.float32), array_at(2), 3, 4.0, stream=0)


def test_parameters_need_types():
    def untyped(x, y: int32):
        pass

    with pytest.raises(TypeError, match="untyped: parameter x has no type"):
        kernel(threads=32)(untyped)


def test_packing_costs_little(fake, record_property):
    """Ten arguments; the driver's own 3 us come on top, see the test below."""
    made = Kernel(ten_arguments, threads=32)
    arguments = [array_at(i) for i in range(8)] + [3, 0.5]
    made.launch(1, *arguments, stream=0)
    start = perf_counter()
    for _ in range(10_000):
        made.launch(1, *arguments, stream=0)
    cost = (perf_counter() - start) / 10_000
    record_property("summary", f"launch with 10 arguments: {cost * 1e6:.1f} us before the driver")
    assert cost < 20e-6


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
