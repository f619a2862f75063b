"""From a bench run to its table, its file and its plot; and the command that runs it all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numba.cuda")

from bench import machine, report

ROOT = Path(__file__).resolve().parents[1]


def row(**changes):
    used = dict(name="a", grid=[17, 7], threads=128, registers=30, shared_bytes=0, spill_bytes=0)
    return (
        dict(op="embed", case="k26-T17", time_us=3.25, gb_per_s=1500.0, tflop_per_s=0.0, flops=0)
        | dict(bytes=4875, floor_us=1.21875, share=0.375, bound="memory", kernels=[used])
        | changes
    )


def result(**changes):
    return (
        dict(
            machine=dict(gpu="NVIDIA H200", arch="sm_90", driver="580.1"),
            commit="abc123",
            date="2026-11-29T10:00:00+00:00",
            roofs=dict(copy=4.15e12, mma=780e12, mma_by="cuBLAS", step=1.2e-6, launch=4.5e-6),
            rows=[row()],
        )
        | changes
    )


def columns(text):
    """Cells of each line of the Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_figures_are_never_rounded_away():
    shown = {v: report.significant(v) for v in (0.00123456, 0.5, 3.14159, 99.96, 1234.5, 0, 1e6)}
    assert list(shown.values()) == ["0.00123", "0.500", "3.14", "100.0", "1,234", "0", "1,000,000"]


def test_the_table_has_a_line_a_case():
    two = row()["kernels"] + [row()["kernels"][0] | dict(grid=[4], registers=99, shared_bytes=2048)]
    small = row(case="k26-T1", share=0.0004, tflop_per_s=0.0123, flops=5, kernels=two)
    head, rule, first, second = columns(report.table([row(), small]))
    assert head == report.HEAD and set("".join(rule)) <= set("-:")
    assert first == ["embed", "k26-T17", "3.25", "1,500", "-", "37.5 %", "30", "0", "17 x 7"]
    assert second[4:] == ["0.0123", "0.0400 %", "30 + 99", "0 + 2,048", "17 x 7 + 4"]
    assert len({len(line) for line in report.table([row(), small]).splitlines()}) == 1


def test_what_was_measured_where_and_when_stands_above():
    text = report.markdown(result())
    assert "NVIDIA H200 (sm_90), driver 580.1, commit abc123, 2026-11-29T10:00:00" in text
    assert "Copy 4.15 TB/s, bfloat16 mma 780 TFLOP/s (cuBLAS)" in text
    assert "empty kernel in a graph 1.20 us, host time of a launch 4.50 us" in text
    assert "mma.sync" not in text, "results of before have no such rate"
    newer = report.markdown(result(roofs=result()["roofs"] | dict(mma_sync=566e12)))
    assert "780 TFLOP/s (cuBLAS), mma.sync 566 TFLOP/s, an empty kernel" in newer
    without = report.markdown(result(roofs=result()["roofs"] | dict(mma=None, mma_by="absent")))
    assert "no mma rate (absent)" in without


def test_the_latest_is_the_one_with_the_latest_date(tmp_path):
    for day, commit in (("28", "old"), ("30", "new"), ("29", "mid")):
        one = result(date=f"2026-11-{day}T10:00:00+00:00", commit=commit)
        report.keep(one, tmp_path)
    assert (tmp_path / "kernels-nvidia-h200-2026-11-30T1000-new.json").exists()
    assert report.latest(tmp_path)["commit"] == "new"


def test_a_run_of_some_cases_leaves_the_others_as_they_were(tmp_path):
    first, again = row(op="a", time_us=1.0), row(op="a", time_us=2.0)
    report.keep(result(rows=[first, row(op="b")], commit="old"), tmp_path)
    later = result(rows=[again], commit="new", date="2026-11-30T10:00:00+00:00")
    report.keep(later, tmp_path)
    other = result(rows=[row(op="c")], date="2026-11-28T10:00:00+00:00")
    other["machine"] = other["machine"] | dict(gpu="another")
    report.keep(other, tmp_path)
    latest = report.latest(tmp_path)
    rows = {each["op"]: (each["time_us"], each["commit"]) for each in latest["rows"]}
    assert rows == {"a": (2.0, "new"), "b": (row(op="b")["time_us"], "old")}
    assert latest["commit"] == "new, old" and "commits new, old" in report.provenance(latest)


def test_the_command_prints_and_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    ops = [row(op=f"op{n}", time_us=2.0 + n, floor_us=0.1 + n) for n in range(15)]
    many = result(rows=[*ops, row(floor_us=0)])
    report.keep(many, tmp_path)
    tokens = dict(what="2 prompts", machine="a CPU", commit="def", date="2026-11-29")
    chain = dict(mode="chain", budget=None, tokens=20, rounds=10)
    (tmp_path / "acceptance.json").write_text(json.dumps(tokens | dict(rows=[chain])))
    report.main(["--results", str(tmp_path)])
    text = capsys.readouterr().out
    assert "op14" in text and "2 prompts; a CPU, commit def" in text and "| chain |" in text
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_all_of_the_plot_is_seen():
    pytest.importorskip("matplotlib")
    ops = [row(op=f"op{n}", floor_us=0.1 + n) for n in range(30)]
    figure = report.drawn(result(rows=ops, commit=", ".join(20 * ["abc1234"])))
    figure.draw_without_rendering()
    (axes,), (legend,) = figure.axes, figure.legends
    boxes = [each.get_window_extent() for each in (axes.title, legend, axes)]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_no_two_marks_are_alike():
    marks = [tuple(report.mark(n).values()) for n in range(30)]
    assert len({*marks}) == 30
    shapes = [{shape for colour, shape in marks if colour == f"C{n}"} for n in range(10)]
    assert all(len(each) == 3 for each in shapes)


def test_a_reader_that_leaves_ends_the_report(tmp_path):
    report.keep(result(rows=500 * [row()]), tmp_path)
    closed, out = os.pipe()
    os.close(closed)
    command = [sys.executable, "-m", "bench.report", "--no-plot", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE)
    os.close(out)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_without_a_measurement_the_report_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit):
        report.main(["--results", str(tmp_path)])
    assert "no kernels-*.json; bench/run_gpu.sh makes one" in capsys.readouterr().err


def test_a_machine_is_described_without_its_host(monkeypatch):
    runtime = SimpleNamespace(driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13020)
    gpu = SimpleNamespace(
        arch="sm_90",
        l2_bytes=60 << 20,
        properties=dict(name=b"NVIDIA H200", multiProcessorCount=132, totalGlobalMem=1 << 37),
        cupy=SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)),
    )
    monkeypatch.setattr(machine, "_output", lambda *command: "580.1, 1980 MHz, 3201 MHz, 700.00 W")
    found = machine.describe(gpu)
    assert (found["gpu"], found["driver"], found["cuda_driver"]) == ("NVIDIA H200", "580.1", "13.0")
    assert found["max_clocks"] == "SM 1980 MHz, memory 3201 MHz"
    assert os.uname().nodename not in json.dumps(found) or len(os.uname().nodename) < 4
    monkeypatch.setattr(machine, "_output", lambda *command: "")
    assert machine.describe(gpu)["driver"] == "unknown" and machine.commit() == "unknown"
    monkeypatch.setenv("DDTREE_NUMBA_COMMIT", "abc123")
    assert machine.commit() == "abc123"


CONFTEST = """
import pytest
from bench.conftest import *
from bench import machine, roof
from tests.toy_bench import FakeGpu

machine.describe = lambda gpu: dict(gpu="Made Up", arch="sm_90", driver="1.2")
roof.measure = lambda gpu: roof.Roofs(1e9, None, "none", mma_sync=1e12, step=1e-6, launch=4e-6)

@pytest.fixture(scope="session")
def gpu():
    return FakeGpu()
"""
BENCH = """
import pytest
from bench.cases import cases
from tests.toy_bench import SPEC

@pytest.mark.parametrize("case", cases(SPEC, rows=(50,)))
def bench_double(measure, gpu, case):
    measure(case, gpu.kernel)
"""
OPTIONS = """[pytest]
python_files = bench_*.py
python_functions = bench_
markers = gpu
filterwarnings = error
"""


@pytest.fixture
def pytest_run(tmp_path):
    """Runs a bench of the made-up operation in a pytest of its own: what it printed and kept."""
    for name, text in (
        ("conftest.py", CONFTEST),
        ("bench_double.py", BENCH),
        ("pytest.ini", OPTIONS),
    ):
        (tmp_path / name).write_text(text)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= dict(PYTHONPATH=str(ROOT), DDTREE_NUMBA_COMMIT="abc123")
    own |= dict(DDTREE_NUMBA_RESULTS_DIR=str(tmp_path / "kept"))

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, list(tmp_path.glob("kept/*.json"))

    return run


def test_a_run_prints_one_table_and_keeps_its_rows(pytest_run):
    text, (kept,) = pytest_run()
    assert "2 passed" in text and "Made Up (sm_90), driver 1.2, commit abc123" in text
    assert columns(text)[2][:6] == ["double", "k26-T50", "2.00", "0.200", "0.0000500", "20.0 %"]
    assert "Rounds" not in text, "pytest-benchmark's own table"
    measured = json.loads(kept.read_text())
    assert kept.name == report.file_name(measured) and kept.name.endswith("-abc123.json")
    (one,) = measured["rows"]
    assert one["time_us"] == pytest.approx(2.0) and one["share"] == pytest.approx(0.2)
    assert measured["roofs"]["launch"] == 4e-6


@pytest.mark.parametrize("options", [["--benchmark-disable"], ["-m", "not gpu"]])
def test_a_smoke_run_measures_and_keeps_nothing(pytest_run, options):
    text, kept = pytest_run(*options)
    assert "passed" in text and "| double" not in text and not kept


PYTHON = """#!/bin/sh
case "$*" in
  *bench.packages* | *bench.device*) exit $REFUSED ;;
  *bench.report*) echo "THE TABLE of $6" ;;
  *" bench") touch "$DDTREE_NUMBA_RESULTS_DIR/kernels-x.json"; echo "5 passed in 1s" ;;
  *) echo "7 passed in 2s"; exit $BROKEN ;;
esac
"""
SANITIZER = """#!/bin/sh
echo "$@" >>"$DDTREE_NUMBA_RESULTS_DIR/calls"
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.fixture
def run_gpu(tmp_path):
    """bench/run_gpu.sh with stand-ins for Python and compute-sanitizer."""
    for name, text in (("python", PYTHON), ("compute-sanitizer", SANITIZER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*steps, broken=0, refused=0):
        own = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}", BROKEN=str(broken))
        own |= dict(REFUSED=str(refused))
        own |= dict(
            PYTHON=str(tmp_path / "python"), DDTREE_NUMBA_RESULTS_DIR=str(tmp_path / "kept")
        )
        command = ["bash", str(ROOT / "bench" / "run_gpu.sh"), *steps]
        done = subprocess.run(command, env=own, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_one_command_runs_everything(run_gpu, tmp_path):
    code, text = run_gpu()
    assert code == 0 and "THE TABLE" in text and "kernels-x.json" in text
    steps = {line[0]: line for line in columns(text)}
    assert {steps[name][1] for name in ("tests", "memcheck", "racecheck", "bench")} == {"ok"}
    assert steps["bench"][3] == "5 passed in 1s" and "0 errors" in steps["racecheck"][3]
    memcheck, racecheck = (tmp_path / "kept" / "calls").read_text().splitlines()
    assert "--tool memcheck" in memcheck and "bench.unpooled" in memcheck and "-m gpu" in memcheck
    assert "--tool racecheck" in racecheck


def test_a_step_that_fails_fails_the_command(run_gpu):
    code, text = run_gpu("tests", "racecheck", broken=3)
    steps = {line[0]: line for line in columns(text)}
    assert code == 1 and steps["tests"][1] == "FAILED 3" and steps["racecheck"][1] == "ok"
    assert "THE TABLE" not in text, "nothing was measured"


def test_what_a_step_lacks_is_said_before_any_starts(run_gpu, tmp_path):
    code, text = run_gpu("tests", "sleep")
    assert code == 2 and text.count("\n") == 1 and "no step sleep: tests memcheck" in text
    assert run_gpu("tests", refused=1) == (1, "")
    (tmp_path / "compute-sanitizer").unlink()
    if shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"):
        pytest.skip("compute-sanitizer is there")
    code, text = run_gpu("tests", "racecheck")
    assert code == 1 and text.count("\n") == 1 and "compute-sanitizer (CUDA toolkit) is not" in text
    assert not (tmp_path / "kept").exists()
    assert run_gpu("tests", "bench")[0] == 0
