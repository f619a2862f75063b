"""Rounds of the engine as users have them: `python -m bench.rounds`, on a GPU.

Held-out code prompts, one at a time, by plain decoding, chains and trees: tokens a second, and
equal tokens. Where PyTorch is installed a trace of one answer says how long the GPU is idle before
each round, and what the host waits for: nothing while it launches a round, and from one launch to
the next once, for the results of the round before.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import acceptance, report, round_trace
from ddtree_numba.engine import Engine
from ddtree_numba.sampling import SamplingParams

MODES: tuple[tuple[str, str | int], ...] = (
    ("ar", 0),
    ("chain", 0),
    ("ddtree", 8),
    ("ddtree", 16),
    ("ddtree", 32),
    ("ddtree", "auto"),
)
TOKENS = 256


def decode(engine: Engine, prompts: list[str], mode: str, budget: str | int) -> dict[str, Any]:
    """All prompts one by one; graphs have been made."""
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    list(engine.generate(prompts[:1], params, mode, budget))
    answers, seconds, emitted, rounds = [], 0.0, 0, 0
    for prompt in prompts:
        tokens: list[int] = []
        for one in engine.generate([prompt], params, mode, budget):
            tokens += one.token_ids
            if one.stats:
                seconds += one.stats.decode_seconds
                emitted += one.stats.completion_tokens
                rounds += one.stats.rounds
        answers.append(tokens)
    traced = round_trace.record(lambda: list(engine.generate(prompts[:1], params, mode, budget)))
    return dict(
        mode=mode,
        budget=budget,
        tokens=answers,
        tokens_per_second=emitted / seconds,
        tokens_per_round=emitted / rounds,
        trace=round_trace.rounds(traced),
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    plain = rows[0]["tokens_per_second"]
    lines = [
        "| mode | budget | tokens/s | against ar | a round | equal | idle before a round, us |"
        " 95 % | waits in a launch | between |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        budget = row["budget"] if row["mode"] == "ddtree" else ""
        rate = row["tokens_per_second"]
        seen = [row["trace"][name] for name in ("idle", "idle_95", "waits", "between")]
        cells = " | ".join("" if cell is None else f"{cell:.3g}" for cell in seen)
        lines.append(
            f"| {row['mode']} | {budget} | {rate:,.0f} | {rate / plain:.2f} x |"
            f" {row['tokens_per_round']:.2f} | {row['equal']} | {cells} |"
        )
    return lines


def measure(engine: Engine, prompts: list[str]) -> list[dict[str, Any]]:
    rows = [decode(engine, prompts, *mode) for mode in MODES]
    wanted = rows[0]["tokens"]
    for row in rows:
        row["equal"] = sum(a == b for a, b in zip(row.pop("tokens"), wanted, strict=True))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, help="so many of the held-out ones, by default all")
    parser.add_argument("--results", type=Path, default=report.FOLDER, help="folder of the figures")
    options = parser.parse_args(arguments)
    prompts = acceptance.held_out_code()[: options.prompts]
    try:
        from bench import machine
        from bench.device import Gpu

        engine = Engine.load(backend="cuda", max_batch=1)
        about = dict(machine=machine.describe(Gpu()), commit=machine.commit(), date=machine.now())
    except (ValueError, ImportError, RuntimeError) as error:
        print(f"bench.rounds: {error}", file=sys.stderr)
        return 1
    rows = measure(engine, prompts)
    print(report.provenance(about), "", *table(rows), sep="\n")
    result = about | dict(prompts=len(prompts), rows=rows)
    print(f"\nkept in {report.keep(result, options.results, 'rounds')}")
    wrong = [row for row in rows if row["equal"] < len(prompts) or row["trace"]["waits"]]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
