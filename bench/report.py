"""The latest measurement of the kernels as Markdown and as a plot: `python -m bench.report`.

Every figure stands in a file of bench/results as it was measured, with GPU, driver, commit and
date; this only prints it.
"""

import argparse
import json
import math
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

from bench.packages import INSTALL

RESULTS = Path(__file__).with_name("results")
FOLDER = Path(os.environ.get("DDTREE_NUMBA_RESULTS_DIR", RESULTS))  # of new figures
PATTERN = "kernels-*.json"
PLOT = "kernels.png"
NOTES = """\
Median device time of one call, caches cold, inside a CUDA graph, launch included. *of roof*: the
larger of bytes / copy rate and operations / mma rate, over the time; both rates measured in the
same run. Several kernels in a call: one entry each, joined by +."""


def latest(folder: Path = RESULTS) -> dict:
    """The newest result in a folder, by the date written in it, with every case's newest row.

    A run may measure some cases alone; what it left out comes from earlier runs on the same GPU,
    with its own roofs and commit.
    """
    found = [json.loads(path.read_text()) for path in folder.glob(PATTERN)]
    if not found:
        raise FileNotFoundError(f"{folder}: no {PATTERN}; bench/run_gpu.sh makes one")
    found.sort(key=lambda result: result["date"])
    newest, rows = found[-1], {}
    for result in found:
        if result["machine"]["gpu"] == newest["machine"]["gpu"]:
            own = dict(commit=result["commit"])
            rows |= {(row["op"], row["case"]): row | own for row in result["rows"]}
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows.values()))
    return newest | dict(rows=list(rows.values()), commit=commits)


def file_name(result: dict, kind: str = "kernels") -> str:
    """kernels-nvidia-h200-2026-11-29T1504-b6c0480.json"""
    gpu = "-".join(result["machine"]["gpu"].lower().split())
    minute = result["date"][:16].replace(":", "")
    return f"{kind}-{gpu}-{minute}-{result['commit']}.json"


def keep(result: dict, folder: Path, kind: str = "kernels") -> Path:
    """Write the result into the folder, under the name that it always has."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(result, kind)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def significant(value: float, digits: int = 3) -> str:
    """At least so many digits: 0.0123, 1.23, 12.3, 1,234; nothing but zero becomes 0."""
    if not value or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def provenance(result: dict) -> str:
    """One line: what was measured, where and when."""
    machine = result["machine"]
    return (
        f"{machine['gpu']} ({machine['arch']}), driver {machine['driver']}, "
        f"commit{'s' * (',' in result['commit'])} {result['commit']}, {result['date']}"
    )


def roof_line(roofs: dict) -> str:
    def rate(name: str) -> str:
        return f"{significant(roofs[name] / 1e12)} TFLOP/s"

    mma = "no mma rate" if roofs["mma"] is None else rate("mma")
    own = f"mma.sync {rate('mma_sync')}, " if "mma_sync" in roofs else ""  # not in older results
    return (
        f"Copy {significant(roofs['copy'] / 1e12)} TB/s, bfloat16 mma {mma} ({roofs['mma_by']}), "
        f"{own}an empty kernel in a graph {significant(roofs['step'] * 1e6)} us, "
        f"host time of a launch {significant(roofs['launch'] * 1e6)} us."
    )


def cells(row: dict) -> list[str]:
    def joined(*values: str) -> str:
        return " + ".join(values)

    used = row["kernels"]
    return [
        row["op"],
        row["case"],
        significant(row["time_us"]),
        significant(row["gb_per_s"]),
        significant(row["tflop_per_s"]) if row["flops"] else "-",
        significant(100 * row["share"]) + " %",
        joined(*(str(one["registers"]) for one in used)),
        joined(*(f"{one['shared_bytes']:,}" for one in used)),
        joined(*(" x ".join(map(str, one["grid"])) for one in used)),
    ]


HEAD = ["op", "case", "us", "GB/s", "TFLOP/s", "of roof", "registers", "shared", "grid"]
LEFT = 2  # columns of text


def table(rows: list[dict]) -> str:
    """Markdown whose columns also line up in a terminal."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * w if i < LEFT else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    lines.insert(1, rule)

    def padded(line: list[str]) -> list[str]:
        pairs = enumerate(zip(line, widths, strict=True))
        return [text.ljust(w) if i < LEFT else text.rjust(w) for i, (text, w) in pairs]

    return "\n".join("| " + " | ".join(padded(line)) + " |" for line in lines)


def markdown(result: dict) -> str:
    parts = [provenance(result), roof_line(result["roofs"]), table(result["rows"]), NOTES]
    return "\n\n".join(parts)


MARKERS = "os^v<>PX*D"  # as many as there are colours, no two alike


def mark(n: int) -> dict[str, str]:
    """Of the n-th operation: ten colours, and each next ten have other shapes."""
    return dict(color=f"C{n % 10}", marker=MARKERS[(n + 3 * (n // 10)) % 10])


def drawn(result: dict) -> Any:
    """A figure of measured time over the roof's time, a point a case: the diagonal is the roof."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["floor_us"] > 0]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots()
    for n, op in enumerate(dict.fromkeys(row["op"] for row in rows)):
        points = [(row["floor_us"], row["time_us"]) for row in rows if row["op"] == op]
        axes.scatter(*zip(*points, strict=True), **mark(n), s=36, label=op, alpha=0.85)
    axes.set(xscale="log", yscale="log", xlabel="roof: time of the bytes or operations alone, us")
    axes.set_ylabel("measured, us")
    ends = [min(row["floor_us"] for row in rows) / 2, max(row["time_us"] for row in rows) * 2]
    for factor, style, name in ((1, "-", "roof"), (1.25, "--", "80 % of the roof")):
        axes.plot(ends, [factor * x for x in ends], style, color="0.4", linewidth=1, label=name)
    step = result["roofs"]["step"] * 1e6
    axes.axhline(step, color="0.4", linestyle=":", linewidth=1, label="an empty kernel")
    axes.set(xlim=ends, ylim=(min(step, *(row["time_us"] for row in rows)) / 2, ends[1]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    title = ["One call, caches cold, in a CUDA graph", *textwrap.wrap(provenance(result), 95)]
    axes.set_title("\n".join(title), fontsize=9)
    return figure


def plot(result: dict, path: Path) -> None:
    figure = drawn(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the measurements")
    parser.add_argument("--file", type=Path, help="this measurement instead of the latest")
    parser.add_argument("--no-plot", action="store_true", help="the table alone")
    options = parser.parse_args(arguments)
    try:
        result = json.loads(options.file.read_text()) if options.file else latest(options.results)
    except FileNotFoundError as error:
        parser.error(str(error))
    print(markdown(result))
    kept = options.results / "acceptance.json"
    if kept.exists():
        from bench import acceptance  # brings the engine in

        tokens = json.loads(kept.read_text())
        origin = (
            f"{tokens['what']}; {tokens['machine']}, commit {tokens['commit']}, {tokens['date']}"
        )
        print(f"\n{origin}\n\n{acceptance.table(tokens)}")
    if not options.no_plot:
        try:
            plot(result, options.results / PLOT)
        except ImportError as error:
            sys.exit(f"bench.report: no plot: {error}; {INSTALL}, or --no-plot")
        print(f"\n{options.results / PLOT}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends as other commands do ahead of `head`
    main()
