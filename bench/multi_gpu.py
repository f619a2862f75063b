"""Exchanges of the GPUs of this machine: `python -m bench.multi_gpu`, one process a GPU.

Times of every ordered method and of NCCL's own all-reduce for T rows of 7,168 bfloat16; the same of
gathers of keys, candidates and logits; a round of 122 sums with a norm between; a soak in which
every word is compared; what a rank that stops costs. Tables to standard output, one JSON file into
the folder of results.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.report import RESULTS, significant

DEADLINE = 540  # seconds of all ranks together
# Event nodes beside every collective would cost the host a millisecond a graph (NCCL 2.28).
ENVIRONMENT = dict(NCCL_GRAPH_MIXING_SUPPORT="0")
# Multicast over NVLink is not to be had on every machine; the methods compared use none.
DEFAULTS = dict(NCCL_NVLS_ENABLE="0")


def work(rank: int, world: int, connection: Connection, options: Any) -> None:
    """A process's main function; an error goes to the parent, which ends the others."""
    try:
        from bench.collectives import Rank

        connection.send(Rank(rank, world, connection, options).all())
    except Exception as error:
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise
    os._exit(0)  # whatever a graph or a communicator still holds


def serve(connections: list[Connection]) -> list[dict]:
    """Pass what the ranks gather between them until every rank has sent its result."""
    while True:
        given = []
        for rank, connection in enumerate(connections):
            try:
                given.append(connection.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} has ended") from None
            if isinstance(given[-1], Exception):
                raise RuntimeError(f"rank {rank}: {given[-1]}")
        if isinstance(given[0], dict):
            return given
        for connection in connections:
            connection.send(given)


def run(world: int, options: Any) -> list[dict]:
    """Every rank's results."""
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=work, args=(rank, world, theirs, options), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    timer = threading.Timer(DEADLINE, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        return serve([mine for mine, _ in pipes])
    finally:
        timer.cancel()
        for process in processes:
            process.join(5)
            process.kill()


def link() -> str:
    """How the first two GPUs are connected, as nvidia-smi calls it: NV18, PIX, SYS."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    rows = (line.split() for line in text.splitlines() if line.startswith("GPU0"))
    return next((row[2] for row in rows if len(row) > 2), "unknown")


def table(title: str, times: dict[str, dict]) -> list[str]:
    """us by method and rows; the fastest of a column in bold."""
    columns = list(next(iter(times.values())))
    best = {c: min(row[c] for row in times.values()) for c in columns}
    lines = [title, "", f"| T | {' | '.join(map(str, columns))} |"]
    lines.append("|---|" + "---:|" * len(columns))
    for name, row in times.items():
        cells = [significant(row[c], 2 if row[c] < 10 else 3) for c in columns]
        marked = [
            f"**{s}**" if row[c] == best[c] else s for c, s in zip(columns, cells, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(marked)} |")
    return [*lines, ""]


def report(result: dict) -> str:
    machine, first = result["machine"], result["ranks"][0]
    lines = [
        f"{result['world']} x {machine['gpu']} ({result['link']}), driver {machine['driver']}, "
        f"NCCL {first['nccl_version']}, commit {result['commit']}, {result['date']}",
        "",
    ]
    lines += table("us an all-reduce of T x 7,168 bfloat16, in a graph of 100:", first["us"])
    lines += [f"chosen by size: {', '.join(f'{t}: {m}' for t, m in first['chosen'].items())}", ""]
    lines += table("us a gather of what each rank has, in a graph of 100:", first["gather_us"])
    lines += table("us of 122 all-reduces with a norm behind each:", first["round_us"])
    for rank in result["ranks"]:
        lines.append(f"soak: {rank['soak']}; self-test: {rank['self_test'] or 'ok'}")
    return "\n".join([*lines, f"last rank stopped: {first['stopped']}"])


def keep(result: dict, folder: Path) -> Path:
    gpu = "-".join(result["machine"]["gpu"].lower().split())
    minute = result["date"][:16].replace(":", "")
    path = folder / f"collectives-{result['world']}x-{gpu}-{minute}-{result['commit']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.multi_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="GPUs to use, by default all that are visible")
    parser.add_argument("--soak", type=int, default=300_000, help="calls of the soak")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args(arguments)

    from bench import machine
    from bench.device import Gpu

    gpu = Gpu()
    visible = gpu.cupy.cuda.runtime.getDeviceCount()
    world = options.ranks or visible
    if not 2 <= world <= visible:
        parser.error(f"{world} ranks, and {visible} GPUs are visible: at least two are needed")
    result = dict(
        world=world,
        link=link(),
        machine=machine.describe(gpu),
        commit=machine.commit(),
        date=machine.now(),
        ranks=run(world, options),
    )
    print(report(result))
    print(f"\nkept in {keep(result, options.results)}")
    ranks = result["ranks"]
    wrong = any(r["self_test"] or r["soak"]["wrong"] or r["soak"]["failure"] for r in ranks)
    return int(wrong or not ranks[0]["stopped"]["failure"])


if __name__ == "__main__":
    sys.exit(main())
