"""One rank's step at full size, against its floor: `python -m bench.bench_step`.

Builds rank 0 of --tp ranks of Kimi K2.6, or of the config in a folder, with random weights on the
device, and times what a round of the engine is made of: draft, build, verify, accept, commit, each
as a CUDA graph, and the whole as one. Communication is left out: sums and gathers over ranks end
with this one. T is the number of verified nodes, 1 being plain decoding. An untrained drafter's
distributions are flat, so that trees are stars of T - 1 different tokens, and the round keeps its
root alone. The floors are those of `step_floor.py` by rates that the same run has measured.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import report, step_floor, step_routing
from bench.step_rank import build, read_configs
from bench.step_time import Clock
from ddtree_numba import verbs
from ddtree_numba.model.config import CheckpointError
from ddtree_numba.model.rank import Ranks
from ddtree_numba.spec.next_token import SamplingParams

TOKENS, CONTEXTS = (1, 5, 9, 17, 33, 65), (1024, 8192, 32768, 131072)
VERBS: dict[str, Callable] = dict(
    draft=verbs.draft,
    build=verbs.build,
    verify=verbs.verify,
    accept=lambda state, ranks, plan: verbs.accept(state, ranks),
    commit=lambda state, ranks, plan: verbs.commit(state, ranks),
)
ROOT = 1  # the token that a round starts from
ROOM = 1000


class Step:
    """Rounds of one request on a rank."""

    def __init__(self, ranks: Ranks, table: np.ndarray, share: np.ndarray, clock: Clock) -> None:
        self.ranks, self.ops, self.clock, self.share = ranks, ranks.ops, clock, share
        host = [np.array([0], np.int32) for _ in range(3)]
        self.roots, self.starts, self.room, self.table = map(self.ops.array, (*host, table))

    def reset(self, context: int) -> None:
        """The state that a round starts from, and cold caches."""
        self.roots[...], self.starts[...], self.room[...] = ROOT, context, ROOM
        self.clock.flush()

    def state(self, tokens: int) -> tuple[verbs.Round, verbs.Plan]:
        """A round of so many nodes, and its plan."""
        many = tokens > 1
        plan = verbs.Plan(many, verbs.CANDIDATES if many else 0, tokens - 1)
        with self.ops.active():
            draws = self.ops.draws([SamplingParams()], [0], tokens)
        return verbs.Round(self.roots, self.starts, self.room, self.table, draws), plan

    def seconds(self, tokens: int, context: int) -> dict[str, float]:
        """Of the verbs and of the round."""
        state, plan = self.state(tokens)
        reset, times = partial(self.reset, context), {}
        for name, verb in VERBS.items():  # in turn: a later one may take an earlier one's memory
            times[name] = self.clock.seconds(partial(verb, state, self.ranks, plan), reset)
        times["draft"] *= tokens > 1  # without drafts an empty graph
        times["round"] = self.clock.seconds(partial(verbs.play, state, self.ranks, plan), reset)
        return times

    def measure(self, tokens: int, context: int, rates: step_floor.Rates, kernels: bool) -> dict:
        """A row: seconds of the verbs and of the round, floors, and what the router chose."""
        ops, ranks, rank = self.ops, self.ranks, self.ranks.ranks[0]
        times, many = self.seconds(tokens, context), tokens > 1
        state, plan = self.state(tokens)

        def forward() -> Any:
            batch = ops.verify_input(state.tree, state.starts, state.page_table)
            return ranks.verify(batch, many)

        with ops.active():
            self.reset(context)
            verbs.draft(state, ranks, plan)
            verbs.build(state, ranks, plan)
            assert np.isfinite(ops.host(forward())).all()
        found = self.clock.kernels(forward) if kernels else []
        chosen = [ops.router.experts(tokens, layer) for layer in range(ops.router.layers)]
        used, overlap = step_routing.statistics(chosen) if chosen else (0.0, float("nan"))
        expected = step_routing.distinct(self.share, tokens)
        config, tp = rank.target.config, rank.target.comm.world
        parts = step_floor.verify(config, tp, tokens, context, expected, rates)
        drafting = step_floor.draft(config, rank.drafter.config, tp, context, rates)
        return dict(
            tokens=tokens,
            context=context,
            seconds=times,
            floor=parts,
            draft_floor=drafting if many else 0.0,
            distinct=used,
            expected_distinct=expected,
            overlap=None if np.isnan(overlap) else overlap,
            kernels=found,
        )


def table(rows: list[dict]) -> str:
    """Milliseconds, a line a row."""
    lines = [
        "      T  context  experts (expected)   verify   floor  of floor    draft   floor"
        "    build   accept   commit    round"
    ]
    for row in rows:
        ms = {name: 1e3 * seconds for name, seconds in row["seconds"].items()}
        floor, drafting = 1e3 * sum(row["floor"].values()), 1e3 * row["draft_floor"]
        lines.append(
            f"{row['tokens']:7}{row['context']:9,}{row['distinct']:9.1f}"
            f" ({row['expected_distinct']:.1f})".ljust(36)
            + f"{ms['verify']:9.3f}{floor:8.3f}{ms['verify'] / floor:9.2f}x"
            + f"{ms['draft']:9.3f}{drafting:8.3f}{ms['build']:9.3f}{ms['accept']:9.3f}"
            + f"{ms['commit']:9.3f}{ms['round']:9.3f}"
        )
    return "\n".join(lines)


def breakdown(row: dict) -> str:
    """Of a verify forward: kernels by name, and the floor of each part."""
    total = sum(each["seconds"] for each in row["kernels"])
    launches = sum(each["launches"] for each in row["kernels"])
    verify = row["seconds"]["verify"]
    head = f"T = {row['tokens']}, context {row['context']:,}: verify {1e3 * verify:.3f} ms"
    lines = [f"{head}; its {launches:,} kernels by name and grid, each alone: {1e3 * total:.3f} ms"]
    for each in row["kernels"]:
        count, seconds = each["launches"], each["seconds"]
        name = f"  {each['name']:36}{' x '.join(map(str, each['grid'])):>16}"
        lines.append(
            f"{name}{count:6} x {1e6 * seconds / count:8.2f} us{1e3 * seconds:9.3f} ms"
            f"{100 * seconds / total:6.1f} %"
        )
    parts = ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in row["floor"].items())
    return "\n".join([*lines, f"  floor, ms: {parts}"])


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def add_sizes(
    parser: argparse.ArgumentParser, tokens: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    """Which model, and at which sizes."""
    add = parser.add_argument
    add("--config", type=Path, help="folder of config.json and drafter/ (K2.6)")
    add("--tp", type=int, default=8, help="ranks that the model is cut into (8)")
    add("--layers", type=int, help="only so many of them")
    for name, default in (("--tokens", tokens), ("--contexts", contexts)):
        add(name, type=numbers, default=default, help=",".join(map(str, default)))
    add("--rounds", type=int, default=20, help="replays behind a figure (20)")


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(prog="bench.bench_step", description=__doc__.splitlines()[0])
    add_sizes(new, TOKENS, CONTEXTS)
    new.add_argument("--overlap", type=float, help="of the experts of two rows (even routing)")
    new.add_argument("--backend", choices=("cuda", "numpy"), default="cuda")
    new.add_argument("--no-kernels", action="store_true", help="no breakdown")
    new.add_argument("--out", type=Path, default=report.FOLDER, help="folder of the figures")
    return new


def run(options: argparse.Namespace, ops: Any, rates: step_floor.Rates, show: Callable) -> dict:
    """Everything but what only a GPU can tell."""
    config, drafter = read_configs(options.config, options.tp, options.layers)
    share = step_routing.draw(ops, config, options.overlap)
    most, nodes = max(options.contexts), max(options.tokens)
    if not 1 <= min(options.tokens) <= nodes <= verbs.CANDIDATES + 1:
        raise ValueError(f"--tokens must be from 1 to {verbs.CANDIDATES + 1}")
    begin = time.perf_counter()
    ranks, pages = build(ops, config, drafter, options.tp, most, nodes)
    ops.finish()
    show(f"rank built in {time.perf_counter() - begin:.1f} s")
    step = Step(ranks, pages, share, Clock(ops, options.rounds))
    rows: list[dict] = []
    with suppress(KeyboardInterrupt):  # what was measured is kept
        for context in options.contexts:
            for tokens in options.tokens:
                kernels = not options.no_kernels and context == options.contexts[0]
                rows.append(step.measure(tokens, context, rates, kernels))
                show(table(rows[-1:]) if len(rows) == 1 else table(rows[-1:]).splitlines()[1])
    for row in rows:
        if row["kernels"]:
            show("\n" + breakdown(row))
    routing = "even" if options.overlap is None else f"overlap {options.overlap}"
    what = dict(config=str(options.config or "Kimi K2.6"), tp=options.tp, routing=routing)
    return what | dict(layers=config.num_hidden_layers, rounds=options.rounds, rows=rows)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    show = partial(print, flush=True)
    try:
        if options.backend == "numpy":
            from ddtree_numba.model.backend import NumpyBackend

            show("numpy: a trial run, whose times and floors mean nothing")
            result = run(options, NumpyBackend(), (1e10, 1e10), show)
            print(json.dumps(result, indent=1), file=sys.stderr)
            return 0
        from bench import machine, roof
        from bench.device import Gpu
        from ddtree_numba.model.cuda_backend import CudaBackend

        gpu = Gpu()
        roofs = roof.measure(gpu)
        about = dict(machine=machine.describe(gpu), commit=machine.commit(), date=machine.now())
        show(report.provenance(about) + "\n" + report.roof_line(asdict(roofs)))
        gpu.cupy.get_default_memory_pool().free_all_blocks()
        ops = CudaBackend()
        result = run(options, ops, (roofs.copy, roofs.mma or float("inf")), show)
    except (CheckpointError, ValueError, RuntimeError, ImportError) as error:
        print(f"bench.bench_step: {error}", file=sys.stderr)
        return 1
    free, all_of_it = ops.xp.cuda.runtime.memGetInfo()
    memory = dict(used_bytes=all_of_it - free, weights_and_cache_bytes=ops.pool.total_bytes())
    show(f"\ndevice memory: {memory['used_bytes'] / 1e9:.1f} of {all_of_it / 1e9:.1f} GB")
    result = about | dict(roofs=asdict(roofs), memory=memory) | result
    show(report.keep(result, options.out, "step"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
