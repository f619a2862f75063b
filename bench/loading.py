"""What loading one rank costs: bytes, time against the disk's own rate, peak memory of the host.

    python golden/make_synthetic.py /disk/wide --layers 3
    python -m bench.loading /disk/wide --tp 8 --rank 3 --cache /disk/packed

Files leave the page cache before each step. The disk's rate is that of one thread that reads the
largest shard from its start in blocks of 16 MiB, the better of two tries, before and after. Weights
are dropped instead of placed (--place cuda: put on the GPU), so memory is the loader's. Exit code 1
below 70 % of that rate or above 4 GiB.

| column | meaning                                                                           |
|--------|-----------------------------------------------------------------------------------|
| kept   | bytes of the rank's slices                                                        |
| read   | bytes asked of the files: slices of columns come with their whole rows            |
| disk   | bytes that came from the disk; others were in the page cache, or read ahead       |
| rate   | read / seconds; of the disk: in per cent of the rate of one thread                |
| peak   | resident memory of the process beyond that before the step                        |
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_numba.model.checkpoint import shard_files
from ddtree_numba.model.config import load_config
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.model.loader import load_target
from ddtree_numba.model.packed import Packed
from ddtree_numba.model.plan import GIB, plan, total
from ddtree_numba.model.reading import Files
from ddtree_numba.progress import Progress
from ddtree_numba.spec.numerics import BF16, Int4Matrix

LEAST_SHARE, MOST_BYTES = 0.70, 4 * GIB
SEQUENTIAL = 2_000_000_000  # bytes, at most, for the disk's own rate
BLOCK = 1 << 24


class Dropped:
    """A backend that keeps nothing."""

    name = "dropped"

    def place(self, tensor: Any, field: str) -> None:
        return None

    def keep(self, tensor: Any, placed: Any) -> Any:
        return tensor


def forget(paths: list[Path]) -> None:
    """Out of the page cache, as far as the system lets go."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def sequential(paths: list[Path]) -> float:
    """Bytes a second of one thread that does nothing else."""
    forget(paths)
    buffer, count = bytearray(BLOCK), 0
    largest = max(paths, key=lambda path: path.stat().st_size)
    begin = time.perf_counter()
    with largest.open("rb", buffering=0) as file:
        while count < SEQUENTIAL and (size := file.readinto(buffer)):
            count += size
    return count / (time.perf_counter() - begin)


def measured(call: Callable[[], Any], paths: list[Path]) -> dict[str, float]:
    """One step: what was read of the files, and what it took."""
    forget(paths)
    asked, original = [0], Files.read

    def counting(self: Files, path: Path, start: int, out: Any) -> None:
        asked[0] += out.nbytes
        original(self, path, start, out)

    Files.read = counting  # type: ignore[method-assign]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, disk = status("VmRSS"), from_disk()
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    Files.read = original  # type: ignore[method-assign]
    return {
        "read": asked[0],
        "disk": from_disk() - disk,
        "seconds": seconds,
        "peak": status("VmHWM") - before,
    }


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def check(options: argparse.Namespace) -> None:
    """CheckpointError, before anything is measured, for what cannot be written."""
    cache, figures = options.cache, options.json
    if cache is not None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "is no folder" if os.path.exists(cache) else error.strerror or error
            raise CheckpointError(f"--cache {cache}: {reason}") from None
        if not os.access(cache, os.W_OK | os.X_OK):
            raise CheckpointError(f"--cache {cache}: cannot be written to")
    if figures is not None:
        if os.path.isdir(figures):
            raise CheckpointError(f"--json {figures}: is a folder")
        if not os.path.isdir(figures.parent):
            raise CheckpointError(f"--json {figures}: {figures.parent} is no folder")
        if not os.access(figures if os.path.exists(figures) else figures.parent, os.W_OK):
            raise CheckpointError(f"--json {figures}: cannot be written")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config, paths = load_config(options.folder), shard_files(options.folder)
    ops: Any = Dropped()
    if options.place == "cuda":
        from ddtree_numba.backends import CUDA_DTYPE, open_backends

        try:
            (ops,) = open_backends("cuda", CUDA_DTYPE)
        except ValueError as error:
            raise CheckpointError(f"--place cuda: {error}") from None
        compiled = np.zeros((1, 64, 8), np.int32), np.zeros((1, 64, 2), BF16), (64, 64)
        ops.place(Int4Matrix(*compiled), "gate_up")

    show = Progress("loading", "B", sys.stderr)

    def load(packed: Packed | None = None) -> None:
        load_target(
            options.folder, config, options.rank, options.tp, ops.place, show, packed=packed
        )

    rates = [sequential(paths)]
    steps = {"checkpoint": measured(load, paths)}
    if options.cache is not None:
        packed = Packed(options.cache, ops.name, ops.keep, lambda line: print(line))
        steps["and write"] = measured(lambda: load(packed), paths)
        path = packed._path(options.folder, options.rank, options.tp)
        if path.is_file():  # else a line has said why not
            steps["packed"] = measured(lambda: load(packed), [path])
    rates.append(sequential(paths))
    show.close()
    kept = total(plan(config, tp=options.tp).target).rank_bytes
    for step in steps.values():
        step["kept"], step["rate"] = kept, step["read"] / step["seconds"]
        step["share"] = step["rate"] / max(rates)
    return {"sequential": rates, "rank": options.rank, "tp": options.tp, "steps": steps}


def render(result: dict[str, Any]) -> str:
    rates = " and ".join(f"{rate / 1e9:.2f}" for rate in result["sequential"])
    lines = [
        f"rank {result['rank']} of {result['tp']}; one thread reads {rates} GB/s",
        "step        kept GB  read GB  disk GB  seconds  GB/s  of the disk  peak GiB",
    ]
    for name, step in result["steps"].items():
        sizes = "".join(f"{step[key] / 1e9:9.2f}" for key in ("kept", "read", "disk"))
        lines.append(
            f"{name:10}{sizes}{step['seconds']:9.2f}{step['rate'] / 1e9:6.2f}"
            f"{step['share']:11.0%}{step['peak'] / GIB:12.2f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, help="checkpoint")
    add("--tp", type=int, default=8, metavar="N", help="ranks (8)")
    add("--rank", type=int, default=0, metavar="N", help="the one that loads (0)")
    add("--cache", type=Path, metavar="DIR", help="also write packed weights there and read them")
    add("--place", choices=("dropped", "cuda"), default="dropped")
    add("--json", type=Path, metavar="FILE", help="the figures, too")
    options = parser.parse_args(argv)
    try:
        check(options)
        result = measure(options)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render(result))
    if options.json:
        try:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            print(f"error: --json {options.json}: {error.strerror or error}", file=sys.stderr)
            return 1
    first = result["steps"]["checkpoint"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    missed = []
    if first["share"] < LEAST_SHARE:
        missed.append(f"{first['share']:.0%} of the disk's rate, not {LEAST_SHARE:.0%}")
    if peak > MOST_BYTES:
        missed.append(f"{peak / GIB:.2f} GiB of memory, above {MOST_BYTES / GIB:.0f}")
    if missed:
        print(f"goal missed: {'; '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
