"""`measure` for bench files, device time for pytest-benchmark, the table at the end."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import harness, machine, report, roof
from bench.device import Cpu, Gpu
from bench.timing import Clock

RESULTS_VARIABLE = "DDTREE_NUMBA_RESULTS_DIR"  # where measured rows are kept; unset: nowhere
# A wrong result ends a bench before it is timed; that alone is the failure.
UNUSED = "ignore:Benchmark fixture was not used:pytest.PytestWarning"
MEASURED = pytest.StashKey[dict]()
CLOCK = Clock()


def pytest_configure(config: pytest.Config) -> None:
    config.option.benchmark_quiet = True  # its own table cannot show rates; --benchmark-verbose


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "measure" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK))
            item.add_marker(pytest.mark.filterwarnings(UNUSED))


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture(scope="session")
def measured(gpu: Gpu, request: pytest.FixtureRequest) -> dict:
    """What the run has measured so far, its roofs first; shown and kept when it ends."""
    result = dict(
        machine=machine.describe(gpu),
        commit=machine.commit(),
        date=machine.now(),
        roofs=asdict(roof.measure(gpu)),
        rows=[],
    )
    return request.config.stash.setdefault(MEASURED, result)


@pytest.fixture
def measure(benchmark, request: pytest.FixtureRequest):
    """measure(case, kernel, ...): check, time and note one case; see harness.measure."""

    def run(case, kernel, **options) -> None:
        device = request.getfixturevalue("gpu") if case.on_gpu else Cpu()
        result = request.getfixturevalue("measured") if case.on_gpu and benchmark.enabled else None
        row = harness.measure(
            case, kernel, device=device, benchmark=benchmark, clock=CLOCK, **options
        )
        if result and row:
            result["rows"].append(harness.against(row, result["roofs"]))
            _keep(result)  # at once: a run that is cut short leaves what it has measured

    return run


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    result = config.stash.get(MEASURED, None)
    if not result or not result["rows"]:
        return
    terminalreporter.section("kernels")
    terminalreporter.write_line(report.markdown(result))
    if os.environ.get(RESULTS_VARIABLE):
        terminalreporter.write_line(f"kept in {_keep(result)}")


def _keep(result: dict) -> Path | None:
    folder = os.environ.get(RESULTS_VARIABLE)
    return report.keep(result, Path(folder)) if folder else None
