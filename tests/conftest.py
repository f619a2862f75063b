"""Shared fixtures: seeded numbers, the embedded model, one engine a process."""

import os

# Before numpy starts: test processes share the cores, one thread each.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def without_a_device(request, monkeypatch) -> None:
    """Backend auto is numpy, here and in commands that a test starts, if it is not marked gpu."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("ddtree_numba.backends.has_driver", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def in_any_order(request) -> Iterator[None]:
    """Kernels on the CPU executor run their blocks, warps and lanes in an order of the test's own.

    No result may depend on who comes first; a test's name is its seed.
    """
    if not request.path.name.startswith("test_kernel_"):
        yield
        return
    from ddtree_numba.kernels import simt

    with simt.shuffled(crc32(request.node.nodeid.encode())):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260612)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden tokens and trees."""
    return REPOSITORY / "golden"


@pytest.fixture(scope="session")
def embedded(golden: Path) -> Path:
    """The embedded target checkpoint; its drafter is the subfolder `drafter`."""
    return golden / "tiny"


@pytest.fixture(scope="session")
def engine(embedded: Path):
    """The embedded model as the command runs it: bfloat16, up to four requests at once."""
    from ddtree_numba.engine import Engine

    return Engine.load(embedded, backend="numpy")


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A small checkpoint of random numbers."""
    from tests.checkpoints import write_tiny

    write_tiny(tmp_path / "tiny", rng)
    return tmp_path / "tiny"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder for packed weights, see `tests/kept.py`."""
    from tests.kept import Kept

    return Kept(tmp_path / "kept", monkeypatch)


def pytest_terminal_summary(terminalreporter) -> None:
    """Print what tests left by `record_property("summary", text)`, from xdist's workers too."""
    lines = [
        text
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, text in report.user_properties
        if name == "summary" and report.when == "call"
    ]
    if lines:
        terminalreporter.section("findings")
        for line in lines:
            terminalreporter.write_line(line)
