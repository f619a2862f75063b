"""What the GPU and the CUDA runtime did in rounds of an answer, by CUPTI, where PyTorch brings it.

Kernels and copies with their times on the GPU, the runtime's calls with the host's. Kernels of a
graph carry the number of the call that launched it.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def record(call: Callable[[], object]) -> list[dict[str, Any]]:
    """The events of a call; none where PyTorch is not installed."""
    try:
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def rounds(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of graphs in a row: idle time of the GPU before each, and what the host waited for.

    `idle`: us from the end of all work before to a graph's first kernel. `waits`: calls of the
    runtime that wait for the GPU while a graph is launched, `between`: from one launch to the next.
    What nothing was seen of is None.
    """
    calls = sorted((e for e in events if e.get("cat") == "cuda_runtime"), key=lambda e: e["ts"])
    launches = [e for e in calls if "GraphLaunch" in e["name"]]
    numbers = {e["args"]["correlation"] for e in launches}
    work = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    idle, end, seen = [], None, set()
    for event in work:
        number = event["args"].get("correlation")
        if number in numbers and number not in seen:
            seen.add(number)
            if end is not None:
                idle.append(max(event["ts"] - end, 0.0))
        end = max(end or 0.0, event["ts"] + event["dur"])
    waits = [e for e in calls if "Synchronize" in e["name"]]
    inside = sum(a["ts"] <= w["ts"] <= a["ts"] + a["dur"] for a in launches for w in waits)
    pairs = zip(launches, launches[1:], strict=False)
    between = [sum(a["ts"] < w["ts"] < b["ts"] for w in waits) for a, b in pairs]
    return dict(
        graphs=len(seen),
        idle=median(idle) if idle else None,
        idle_95=quantiles(idle, n=20)[-1] if len(idle) > 1 else None,
        waits=inside if launches else None,
        between=median(between) if between else None,
        names=sorted({e["name"] for e in waits}),
    )
