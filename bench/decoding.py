"""The embedded model, decoded by ranks that have a GPU each: tokens, rates, a rank that is killed.

Every run is the command itself, on the golden prompts. All runs that sum in rank order have to give
the same tokens: modes, budgets, batches, ways to meet, and ranks that are streams of one GPU.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "golden" / "golden_tokens.jsonl"
SURE = 0.5  # a lead, in logits, that rounding to bfloat16 cannot overturn
LONGEST = 120.0  # seconds of a run
TOKENS, LONG, DOOMED = 64, 400, 500  # of an answer
FIRST = "ar, batch 1"
TREE = ("--mode", "ddtree", "--budget", "16")
# name -> options, environment
RUNS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    FIRST: (("--mode", "ar", "--batch", "1"), {}),
    "ar, batch 8": (("--mode", "ar", "--batch", "8"), {}),
    "ddtree 16, batch 1": ((*TREE, "--batch", "1"), {}),
    "ddtree 16, batch 8": ((*TREE, "--batch", "8"), {}),
    "ddtree auto, batch 4": (("--mode", "ddtree"), {}),
    "chain, batch 4": (("--mode", "chain"), {}),
    "ddtree 16, memory of the host": (TREE, dict(DDTREE_NUMBA_MEETING="host")),
    "ddtree 16, NCCL": (TREE, dict(DDTREE_NUMBA_MEETING="nccl")),
    "ddtree 16, streams of one GPU": ((*TREE, "--ranks", "threads"), {}),
}
FAST = "ddtree 16, NCCL's own sum"  # promises nothing
RUNS[FAST] = ((*TREE, "--fast-allreduce"), {})


def command(world: int, *more: str) -> list[str]:
    shared = ("--backend", "cuda", "--tp", str(world), "--ignore-eos", "--debug")
    return [sys.executable, "-m", "ddtree_numba.generate", *shared, *more]


def golden() -> list[dict]:
    return [json.loads(line) for line in GOLDEN.read_text().splitlines()]


def decode(
    world: int, prompts: list[list[int]], tokens: int, options: tuple, env: dict[str, str]
) -> dict[str, Any]:
    """Every prompt's tokens, by one run of the command."""
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder) / "given.jsonl", Path(folder) / "got.jsonl"
        given.write_text("".join(json.dumps(dict(token_ids=ids)) + "\n" for ids in prompts))
        files = "--input", str(given), "--output", str(got), "--max-new-tokens", str(tokens)
        begin = time.perf_counter()
        ran = subprocess.run(
            command(world, *files, *options),
            cwd=ROOT,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        if ran.returncode:
            raise RuntimeError(f"{' '.join(options)}: {ran.stderr.strip()[-400:]}")
        records = [json.loads(line) for line in got.read_text().splitlines()]
    records.sort(key=lambda record: record["index"])
    rates = [r["tokens_per_second"] for r in records if r["tokens_per_second"]]
    return dict(
        tokens=[record["token_ids"] for record in records],
        rounds=sum(record["rounds"] for record in records),
        tokens_per_second=sorted(rates)[len(rates) // 2] if rates else None,
        seconds=time.perf_counter() - begin,
    )


def against_golden(tokens: list[list[int]], lines: list[dict]) -> dict[str, Any]:
    """Where answers leave the golden ones: only where the golden lead leaves room for it."""
    leads = []
    for ours, line in zip(tokens, lines, strict=True):
        pairs = zip(ours, line["tokens"], line["gaps"], strict=False)
        leads += [gap for own, theirs, gap in pairs if own != theirs][:1]
    largest = max(leads, default=0.0)
    return dict(answers=len(lines), left=len(leads), largest_lead=largest, right=largest <= SURE)


def killed(world: int) -> dict[str, Any]:
    """Seconds from the death of the last rank, in the middle of decoding, to the end of all."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder) / "given.jsonl", Path(folder) / "got.jsonl"
        given.write_text('"def"\n' * 1000)  # a minute of decoding
        files = "--input", str(given), "--output", str(got), "--max-new-tokens", str(DOOMED)
        process = subprocess.Popen(
            command(world, *files, "--mode", "ar"),
            cwd=ROOT,
            env=os.environ | dict(DDTREE_NUMBA_BENCH=mark),
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + LONGEST
        while process.poll() is None and not (got.exists() and got.stat().st_size):
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.05)
        ranks = ranks_of(mark)
        if world - 1 not in ranks:
            raise RuntimeError(f"nothing was decoded: {process.communicate()[1].strip()[-400:]}")
        begin = time.perf_counter()
        os.kill(ranks[world - 1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        while ranks_of(mark):
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
    said = err.strip().splitlines()[-1:]
    return dict(seconds=seconds, code=process.returncode, said=said, left=held_by(ranks))


def ranks_of(mark: str) -> dict[int, int]:
    """Rank -> process id, of the processes of one run."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            environ = (folder / "environ").read_bytes() if folder.name.isdecimal() else b""
        except OSError:
            continue
        values = dict(pair.partition(b"=")[::2] for pair in environ.split(b"\0"))
        if values.get(b"DDTREE_NUMBA_BENCH") == mark.encode() and b"RANK" in values:
            found[int(values[b"RANK"])] = int(folder.name)
    return found


def held_by(ranks: dict[int, int]) -> list[str]:
    """What these processes still hold of a GPU's memory."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if int(line.split(",")[0]) in ranks.values()]


def measure(world: int) -> dict[str, Any]:
    """All runs; `wrong` names those that gave other tokens than the first."""
    lines = golden()
    prompts = [line["prompt_ids"] for line in lines]
    runs = {name: decode(world, prompts, TOKENS, *given) for name, given in RUNS.items()}
    first = runs[FIRST]["tokens"]
    for run in runs.values():
        run["equal"] = sum(a == b for a, b in zip(run.pop("tokens"), first, strict=True))
    check = dict(DDTREE_NUMBA_CHECK_RANKS="10")  # ranks compare what they hold
    soak = decode(world, prompts, LONG, RUNS["ddtree 16, batch 8"][0], check)
    plain = decode(world, prompts, LONG, RUNS["ar, batch 8"][0], {})
    different = sum(a != b for a, b in zip(soak.pop("tokens"), plain.pop("tokens"), strict=True))
    soak |= dict(rounds=soak["rounds"] + plain["rounds"], different=different)
    wrong = [name for name, run in runs.items() if run["equal"] < len(lines) and name != FAST]
    result = dict(golden=against_golden(first, lines), runs=runs, soak=soak, killed=killed(world))
    if different or not result["golden"]["right"]:
        wrong.append("soak" if different else "golden")
    return result | dict(prompts=len(lines), tokens=TOKENS, wrong=wrong)


def table(result: dict[str, Any]) -> list[str]:
    prompts, end, soak = result["prompts"], result["killed"], result["soak"]
    lines = [
        f"Embedded model, {prompts} prompts, {result['tokens']} tokens each:",
        "",
        "| run | equal answers | rounds | tokens/s of a request |",
        "|---|---:|---:|---:|",
    ]
    for name, run in result["runs"].items():
        rate = run["tokens_per_second"]
        lines.append(f"| {name} | {run['equal']} of {prompts} | {run['rounds']} | {rate:,.0f} |")
    first = result["golden"]
    return [
        *lines,
        "",
        f"golden tokens: {first['left']} of {first['answers']} answers leave them, at leads of"
        f" {first['largest_lead']:.3f} or less",
        f"soak: {soak['rounds']} rounds, {soak['different']} answers differ",
        f"last rank killed: all ended in {end['seconds']:.2f} s, exit code {end['code']},"
        f" {end['said']}; memory held: {end['left'] or 'none'}",
    ]
