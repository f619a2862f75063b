"""Tokens a round on held-out code prompts, by budget: `python -m bench.acceptance [--write]`.

Greedy, 128 tokens, every code prompt of golden/prompts.jsonl. The answer is the same in every row
of the table (the law), so rounds are the only thing that a budget changes.
"""

import argparse
import datetime
import json
import platform
import subprocess
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ddtree_numba.engine import Engine
from ddtree_numba.sampling import SamplingParams

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "acceptance.json"
TOKENS = 128
ROWS = [("chain", 0), *(("ddtree", budget) for budget in (1, 2, 4, 8, 16, 32, 64))]


def held_out_code() -> list[str]:
    """The raw code prompts that no training saw."""
    lines = (ROOT / "golden" / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    return [one["text"] for one in prompts if not one["chat"] and one["name"].startswith("code")]


def measure(engine: Engine, prompts: list[str], mode: str, budget: int) -> dict:
    """Emitted tokens over rounds of all prompts together."""
    params = SamplingParams(max_new_tokens=TOKENS)
    tokens = rounds = 0
    for prompt in prompts:
        for one in engine.generate([prompt], params, mode, budget):
            if one.stats:
                tokens += one.stats.completion_tokens
                rounds += one.stats.rounds
    return {
        "mode": mode,
        "budget": budget if mode == "ddtree" else None,
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_round": round(tokens / rounds, 3),
    }


def table(result: dict) -> str:
    """The rows as Markdown."""
    chain = next(row["tokens"] / row["rounds"] for row in result["rows"] if row["mode"] == "chain")
    lines = ["| mode | budget | tokens per round | against chain |", "|---|---|---|---|"]
    for row in result["rows"]:
        rate = row["tokens"] / row["rounds"]
        budget = "" if row["budget"] is None else row["budget"]
        lines.append(f"| {row['mode']} | {budget} | {rate:.2f} | {rate / chain - 1:+.0%} |")
    return "\n".join(lines)


def commit() -> str:
    """The commit that was measured, marked if the tree had changes."""
    text = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return text.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
    parser.add_argument("--show", action="store_true", help="only print the kept result")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(RESULT.read_text())))
        return
    engine, prompts = Engine.load(), held_out_code()
    rows = [measure(engine, prompts, *row) for row in tqdm(ROWS, desc="rows", leave=False)]
    result = {
        "what": f"{len(prompts)} held-out code prompts, greedy, {TOKENS} tokens each",
        "machine": f"{platform.machine()} CPU, numpy {np.__version__}",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
