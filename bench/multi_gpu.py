"""Exchanges of the GPUs of this machine: `python -m bench.multi_gpu`, one process a GPU.

Times of every ordered method and of NCCL's own all-reduce for T rows of 7,168 bfloat16; the same of
gathers of keys, candidates and logits; a round of 122 sums with a norm between; a soak in which
every word is compared; what a rank that stops costs. Then the embedded model, decoded by the ranks:
`decoding.py`; then rounds of full-size ranks: `step_ranks.py`. Tables to standard output, one JSON
file into the folder of results.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench import decoding, gpu_processes, step_ranks
from bench.report import FOLDER, keep, significant

PARTS = ("collectives", "decoding", "step")


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


def heading(result: dict) -> str:
    """Where and when."""
    machine = result["machine"]
    return (
        f"{result['world']} x {machine['gpu']} ({result['link']}), driver {machine['driver']}, "
        f"NCCL {result['nccl']}, commit {result['commit']}, {result['date']}"
    )


def report(result: dict) -> str:
    lines = [heading(result), ""]
    if "ranks" in result:
        lines += exchanges(result["ranks"])
    if "decoding" in result:
        lines += [*decoding.table(result["decoding"]), ""]
    if "step" in result:
        lines += [step_ranks.title(result["step"]), "", *step_ranks.table(result["step"]), ""]
    return "\n".join([*lines, f"wrong: {', '.join(faults(result)) or 'nothing'}"])


def exchanges(ranks: list[dict]) -> list[str]:
    first = ranks[0]
    lines = table("us an all-reduce of T x 7,168 bfloat16, in a graph of 100:", first["us"])
    lines += [f"chosen by size: {', '.join(f'{t}: {m}' for t, m in first['chosen'].items())}", ""]
    lines += table("us a gather of what each rank has, in a graph of 100:", first["gather_us"])
    lines += table("us of 122 all-reduces with a norm behind each:", first["round_us"])
    lines += [f"soak: {r['soak']}; self-test: {r['self_test'] or 'ok'}" for r in ranks]
    return [*lines, f"last rank stopped: {first['stopped']}", ""]


def describe(parser: argparse.ArgumentParser, wanted: int | None) -> tuple[int, dict]:
    """How many GPUs to use, and what they are; it ends with an error if there are too few."""
    from bench import machine
    from bench.collectives import nccl_version
    from bench.device import Gpu

    gpu = Gpu()
    visible = gpu.cupy.cuda.runtime.getDeviceCount()
    world = wanted or visible
    if not 2 <= world <= visible:
        parser.error(f"{world} ranks, and {visible} GPUs are visible: at least two are needed")
    about = dict(machine=machine.describe(gpu), commit=machine.commit(), date=machine.now())
    return world, about | dict(world=world, link=link(), nccl=nccl_version())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.multi_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="GPUs to use, by default all that are visible")
    parser.add_argument("--soak", type=int, default=300_000, help="calls of the soak")
    parser.add_argument("--part", choices=PARTS, help="one part alone, by default all")
    parser.add_argument("--step", default="", help="options of step_ranks.py, as one text")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON file")
    options = parser.parse_args(arguments)

    try:
        world, result = describe(parser, options.ranks)
    except (ImportError, RuntimeError) as error:
        print(f"bench.multi_gpu: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    names = [options.part] if options.part else PARTS
    parts: dict[str, Callable[[], dict]] = dict(
        collectives=lambda: dict(ranks=gpu_processes.run(world, options, "bench.collectives")),
        decoding=lambda: dict(decoding=decoding.measure(world)),
    )
    if "step" in names:
        sizes = step_ranks.asked(world, options.step)  # refused before anything is measured
        parts["step"] = lambda: dict(step=step_ranks.measure(world, sizes))
    for name in names:
        try:
            result |= parts[name]()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # the others go on
            result.setdefault("failed", {})[name] = str(error)
    print(report(result))
    print(f"\nkept in {keep(result, options.results, f'gpus-{world}x')}")
    return int(bool(faults(result)))


def faults(result: dict) -> list[str]:
    """What went wrong, in short."""
    ranks = result.get("ranks", [])
    wrong = [f"rank {n}: self-test" for n, rank in enumerate(ranks) if rank["self_test"]]
    bad = (n for n, r in enumerate(ranks) if r["soak"]["wrong"] or r["soak"]["failure"])
    wrong += [f"rank {n}: soak" for n in bad]
    if ranks and not ranks[0]["stopped"]["failure"]:
        wrong.append("a rank that stopped was not noticed")
    if "step" in result:
        wrong += step_ranks.failures(result["step"])
    wrong += [f"{name}: {error}" for name, error in result.get("failed", {}).items()]
    return wrong + result.get("decoding", {}).get("wrong", [])


if __name__ == "__main__":
    sys.exit(main())
