"""Scripts that need more than the package: without it they end with one line, and write nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import packages, report
from tests.command import ROOT

HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name in {!r} else find(name, *where)
"""


def ran_without(names: str, tmp_path: Path, *command: str) -> list[str]:
    """What a command says without these modules; it must fail and leave no file."""
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names.split()))
    own = dict(PYTHONPATH=str(tmp_path), PYTHON=sys.executable)
    own |= dict(DDTREE_NUMBA_RESULTS_DIR=str(tmp_path / "kept"))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} <= {"sitecustomize.py", "__pycache__"}
    return done.stderr.splitlines()


def test_retraining_names_the_package(tmp_path):
    command = [sys.executable, "golden/retrain.py", "--out", str(tmp_path / "out")]
    (line,) = ran_without("torch", tmp_path, *command)
    advice = "pip install -e . torch tiktoken safetensors regex"
    assert line == f"retrain.py: No module named 'torch'; {advice}"
    assert advice in (ROOT / "golden" / "README.md").read_text()


@pytest.mark.parametrize("script", ["run_gpu.sh", "run_multi_gpu.sh"])
def test_scripts_of_a_gpu_name_all_packages_at_once(script, tmp_path):
    names = "numba_cuda cupy pytest_timeout"
    (line,) = ran_without(names, tmp_path, "bash", f"bench/{script}")
    begin, end = f"bench/{script}: not installed: ", f"; {packages.INSTALL}"
    assert line.startswith(begin) and line.endswith(end)
    found = line.removeprefix(begin).removesuffix(end).split(", ")
    assert {"cupy-cuda13x", "numba-cuda"} <= {*found}
    assert ("pytest-timeout" in found) == (script == "run_gpu.sh")


ON_A_GPU = {"bench/run_gpu.sh": "bash bench/run_gpu.sh"}
ON_A_GPU |= {"bench.multi_gpu": "bash bench/run_multi_gpu.sh"}
ON_A_GPU |= {f"bench.{x}": f"{sys.executable} -u -m bench.{x}" for x in ("bench_step", "rounds")}
NEEDED = "numba_cuda cupy tiktoken jinja2 tqdm greenlet safetensors pytest_benchmark pytest_timeout"


@pytest.mark.parametrize("who", ON_A_GPU)
def test_what_runs_on_a_gpu_says_that_there_is_none(who, tmp_path, monkeypatch):
    for name in NEEDED.split():
        pytest.importorskip(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (line,) = ran_without("", tmp_path, *ON_A_GPU[who].split())
    found = r"(backend 'cuda': )?no (NVIDIA driver found|usable NVIDIA device) \(.+\); .+"
    assert re.fullmatch(f"{who}: {found}", line)


def test_modules_that_are_there_are_not_named(capsys):
    packages.main("a script", "numpy", "sys")
    assert packages.missing(["numpy", "no_such_module"]) == ["no-such-module"]
    assert capsys.readouterr() == ("", "")


def test_nccl_is_named(monkeypatch):
    nccl = pytest.importorskip("cupy.cuda.nccl")
    from bench.collectives import nccl_version

    monkeypatch.setattr(nccl, "available", False)
    with pytest.raises(ImportError, match="NCCL is not installed: pip install nvidia-nccl-cu13"):
        nccl_version()


def test_the_report_without_matplotlib_is_the_table(monkeypatch, tmp_path, capsys):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(report, "latest", lambda folder: {})
    monkeypatch.setattr(report, "markdown", lambda result: "THE TABLE")
    with pytest.raises(SystemExit, match="no plot: .*matplotlib.*; pip install .*, or --no-plot"):
        report.main(["--results", str(tmp_path)])
    assert capsys.readouterr().out == "THE TABLE\n" and list(tmp_path.iterdir()) == []
