"""Where and when something was measured: GPU, driver, versions, commit, date."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.device import Gpu
from ddtree_numba.kernels.compile import versions

ROOT = Path(__file__).parents[1]
COMMIT_VARIABLE = "DDTREE_NUMBA_COMMIT"  # for a copy of the sources without its repository
QUERY = "driver_version,clocks.max.sm,clocks.max.memory,power.limit"


def commit() -> str:
    """The commit that is measured, marked if the tree has changes."""
    given = os.environ.get(COMMIT_VARIABLE)
    return given or _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown"


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe(gpu: Gpu) -> dict[str, Any]:
    """The GPU and all that stands between a kernel and it; the host by its processor alone."""
    properties, runtime = gpu.properties, gpu.cupy.cuda.runtime
    listed = _output("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader", "--id=0")
    driver, sm_clock, memory_clock, power = [*map(str.strip, listed.split(",")), *4 * ["unknown"]][
        :4
    ]
    return dict(
        gpu=properties["name"].decode(),
        arch=gpu.arch,
        multiprocessors=properties["multiProcessorCount"],
        memory_bytes=properties["totalGlobalMem"],
        l2_bytes=gpu.l2_bytes,
        driver=driver or "unknown",
        cuda_driver=_dotted(runtime.driverGetVersion()),
        cuda_runtime=_dotted(runtime.runtimeGetVersion()),
        max_clocks=f"SM {sm_clock}, memory {memory_clock}",
        power_limit=power,
        processor=_processor(),
        python=platform.python_version(),
        versions={**versions(), **{name: _version(name) for name in ("numpy", "cupy-cuda13x")}},
    )


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
