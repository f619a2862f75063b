"""The README's figures, from bench/results: `python -m bench.readme` writes, a test compares."""

import argparse
import json
import re
from pathlib import Path

from bench import acceptance, multi_gpu, report, step_ranks

README = Path(__file__).parents[1] / "README.md"
# What a round and a layer are made of, at K2.6's sizes; bench/results holds every case.
KERNELS = (
    ("draft_topk", "k26-k32"),
    ("tree_build", "k26-R1-B16"),
    ("tree_build", "k26-R1-B64"),
    ("tree_build", "k26-R64-B64"),
    ("tree_size", "k26"),
    ("paths_and_positions", "k26-R1-N17"),
    ("next_token", "k26-greedy-rows17"),
    ("next_token", "k26-filters-rows17"),
    ("tree_accept", "k26-R1-N17"),
    ("cache_commit", "1-requests-5-rows"),
    ("round", "1-requests-budget16"),
    ("round", "64-requests-budget64"),
    ("linear", "k26-T1"),
    ("linear", "k26-T9"),
    ("linear", "k26_o-T9"),
    ("linear", "k26-T1024"),
    ("norm_rope_append", "k26-T9"),
    ("absorb_rope", "k26-T9"),
    ("linear_swiglu", "k26_shared-T9"),
    ("tree_attention", "k26-8k-N1"),
    ("tree_attention", "k26-8k-N17"),
    ("tree_attention", "k26-128k-N1"),
    ("router", "k26-T1"),
    ("router", "k26-T9"),
    ("moe_int4", "k26-T1"),
    ("moe_int4", "k26-T9"),
    ("moe_int4", "k26-T65"),
    ("moe_int4", "k26-T1024"),
    ("qk_norm_rope", "k26-T8"),
    ("draft_attention", "k26-R1-8192"),
    ("embed", "k26-T4096"),
    ("rms_norm", "k26-T1"),
    ("rms_norm", "k26-T4096"),
    ("swiglu", "k26-T1"),
    ("swiglu", "k26-T4096"),
    ("rope", "k26-T4096"),
)

RATES = {"memory": ("gb_per_s", "GB/s"), "compute": ("tflop_per_s", "TFLOP/s")}  # by the roof


def budgets() -> str:
    """Tokens a round by budget, on the embedded model."""
    result = json.loads(acceptance.RESULT.read_text())
    source = f"{result['machine']}, commit {result['commit']}, {result['date']}"
    return f"{acceptance.table(result)}\n\n{result['what'].capitalize()} ({source})."


def kernels() -> str:
    """Chosen rows of the latest kernel measurement."""
    result = report.latest()
    rows = {(row["op"], row["case"]): row for row in result["rows"]}
    lines = [
        "| kernel | case | time | rate | of the roof | commit |",
        "|---|---|---:|---:|---:|---|",
    ]
    for key in KERNELS:
        row = rows[key]
        field, unit = RATES[row["bound"]]
        time, rate = report.significant(row["time_us"]), report.significant(row[field])
        share = report.significant(100 * row["share"])
        figures = f"{time} us | {rate} {unit} | {share} % | {row['commit']}"
        lines.append(f"| {key[0]} | {key[1]} | {figures} |")
    commits = ", ".join(dict.fromkeys(rows[key]["commit"] for key in KERNELS))
    return "\n".join([*lines, "", report.provenance(result | dict(commit=commits)) + "."])


def newest(kind: str, part: str = "rows") -> dict:
    """The newest results of one kind that have this part."""
    files = report.RESULTS.glob(f"{kind}-*.json")
    found = [one for one in map(json.loads, map(Path.read_text, files)) if part in one]
    return max(found, key=lambda one: one["date"])


def step() -> str:
    """The latest step of one rank at full size: verify and its floor, by nodes and context."""
    result = newest("step")
    found = {(row["tokens"], row["context"]): row for row in result["rows"]}
    contexts = sorted({context for _, context in found})
    heads = " | ".join(f"{context:,} positions" for context in contexts)
    lines = [f"| ms, nodes | {heads} |", "|---:|" + "---:|" * len(contexts)]
    for tokens in sorted({tokens for tokens, _ in found}):
        rows = (found[tokens, context] for context in contexts)
        pairs = ((1e3 * r["seconds"]["verify"], 1e3 * sum(r["floor"].values())) for r in rows)
        cells = " | ".join(f"{verify:.2f} ({floor:.2f})" for verify, floor in pairs)
        lines.append(f"| {tokens} | {cells} |")
    memory = f"{result['memory']['used_bytes'] / 1e9:.1f} GB of memory"
    return "\n".join(["\n".join(lines), "", f"{report.provenance(result)}; {memory}."])


def rounds() -> str:
    """Rates on held-out code, and how long the GPU is idle between rounds."""
    result = newest("rounds")
    plain = result["rows"][0]["tokens_per_second"]
    lines = [
        "| mode | budget | tokens/s | against ar | tokens per round | idle before a round |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        budget = row["budget"] if row["mode"] == "ddtree" else ""
        rate, each = row["tokens_per_second"], row["tokens_per_round"]
        idle = row["trace"]["idle"]  # None without PyTorch
        lines.append(
            f"| {row['mode']} | {budget} | {rate:,.0f} | {rate / plain:.2f} x | {each:.2f} |"
            f" {'' if idle is None else f'{idle:.0f} us'} |"
        )
    return "\n".join([*lines, "", f"{report.provenance(result)}."])


def exchanges() -> str:
    """What ranks give to each other, in the way that is chosen and in NCCL's."""
    result = newest("gpus", "ranks")
    first = result["ranks"][0]
    rows = list(first["chosen"])
    ways = {
        "ours, in rank order": [first["us"][first["chosen"][t]][t] for t in rows],
        "NCCL all-gather, then the same sum": [
            first["us"]["NCCL all-gather, sum"][t] for t in rows
        ],
        "NCCL's own, in an order of its own": [first["us"]["NCCL all-reduce"][t] for t in rows],
    }
    lines = [f"| us, T rows of 7,168 | {' | '.join(rows)} |", "|---|" + "---:|" * len(rows)]
    for name, times in ways.items():
        cells = [report.significant(us, 2 if us < 10 else 3) for us in times]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{multi_gpu.heading(result)}."])


def ranks() -> str:
    """Rounds of several full-size ranks."""
    result = newest("gpus", "step")
    lines = step_ranks.table(result["step"])
    what = step_ranks.title(result["step"]).removesuffix(":")
    return "\n".join([*lines, "", f"{what}; {multi_gpu.heading(result)}."])


SECTIONS = {
    "budgets": budgets,
    "kernels": kernels,
    "rounds": rounds,
    "step": step,
    "exchanges": exchanges,
    "ranks": ranks,
}


def filled(text: str) -> str:
    """The README with each marked section made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md: expected one section between {begin} and {end}")
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        section = f"{begin}\n{make()}\n{end}"
        text = pattern.sub(lambda _, section=section: section, text)
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(prog="bench.readme", description=__doc__).parse_args()
    README.write_text(filled(README.read_text()))
