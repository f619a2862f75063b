"""Compiling for a named architecture without a GPU, and the cache on disk."""

import multiprocessing

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, float32, int32

from ddtree_numba.kernels import cache, launch, ptx
from ddtree_numba.kernels import compile as compiling
from ddtree_numba.kernels.arguments import read, update, write
from ddtree_numba.kernels.compile import CompileError
from ddtree_numba.kernels.launch import Kernel


@cuda.jit
def scaled(x: read(float32), y: write(float32), count: int32, factor: float32):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        y[i] = x[i] * factor


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
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


@cuda.jit
def waits(y: update(int32)):
    ptx.wait_for_previous()
    y[0] = y[0] + 1


def test_kernels_that_wait_for_the_one_before_also_run_on_older_devices():
    made = Kernel(waits, threads=32, pdl=True)
    assert "griddepcontrol" in made.ptx("sm_90") and "griddepcontrol" not in made.ptx("sm_80")
    assert made.compile("sm_80").arch == "sm_80"


def test_n01_newer_ptx_is_marked_as_what_the_driver_reads():
    text = ".version 9.5\n.target sm_90\n.visible .entry _Z3abc(\n"
    assert compiling.readable(text, "name") == (
        ".version 9.0\n.target sm_90\n.visible .entry name(\n"
    )
    assert ".version 8.0" in compiling.readable(text.replace("9.5", "8.0"), "name")
