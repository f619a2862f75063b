"""Ranks of a full-size model on several GPUs, one process a GPU: a part of `multi_gpu.py`.

Each GPU holds one rank of --tp, with random weights made there, as `bench_step` builds it. With as
many GPUs as ranks that is the whole model; with fewer, sums and gathers are those of fewer ranks,
all else is the same. Rounds are timed twice: as they are, and with sums and gathers left out. The
slowest rank's times count.
"""

import argparse
from dataclasses import replace
from typing import Any

from bench import gpu_processes, step_routing
from bench.bench_step import Step, add_sizes
from bench.step_rank import OneOf, build, read_configs, repeated
from bench.step_time import Clock

TOKENS, CONTEXTS = (1, 9, 17), (8192, 32768)
# Tokens a round of chains of 7, as published: K2.7-Code's drafter on coding traffic, the mean of
# K2.5's card (huggingface.co: mredmond/Kimi-K2.7-Code-DFlash-kimi-ft-v3, z-lab/Kimi-K2.5-DFlash).
# Nobody has published K2's with trees, whose rounds are no shorter.
LENGTHS = (3.10, 4.86)


def some_of(comm: Any, tp: int) -> Any:
    """A connection of fewer ranks than the model is cut into: the others' parts are repeated."""
    gather, comm.world = comm.all_gather, tp
    comm.all_gather = lambda part: repeated(gather(part), tp // comm.peers.world)
    return comm


class Rank:
    """One process with its GPU."""

    def __init__(self, group: gpu_processes.Group, options: Any) -> None:
        from ddtree_numba.model.comm_cuda import PeerComm, room_of
        from ddtree_numba.model.cuda_backend import CudaBackend
        from ddtree_numba.model.peer_memory import connect

        self.group, self.options = group, options
        self.ops: Any = CudaBackend(group.rank)
        config, drafter = read_configs(options.config, options.tp, options.layers)
        config = replace(config, shards_latents=options.shard_latents)
        most, nodes = max(options.contexts), max(options.tokens)
        self.ranks, self.pages = build(self.ops, config, drafter, options.tp, most, nodes)
        self.share = step_routing.draw(self.ops, config, None)
        room = room_of(group.world, config.hidden_size)
        memory, self.wrong = connect(group.rank, group.world, room, group.gather)
        comm: Any = PeerComm(memory, self.ops, group)  # type: ignore[arg-type]
        self.comm = some_of(comm, options.tp)
        self.clock = Clock(self.ops, options.rounds, group.slowest)

    def use(self, comm: Any) -> None:
        (rank,) = self.ranks.ranks
        self.ranks.comm = rank.comm = rank.target.comm = comm
        if rank.drafter is not None:
            rank.drafter.comm = comm

    def all(self) -> dict:
        rows = []
        for name, comm in (("with", self.comm), ("without", OneOf(self.options.tp))):
            self.use(comm)
            step = Step(self.ranks, self.pages, self.share, self.clock)
            for context in self.options.contexts:
                for tokens in self.options.tokens:
                    seconds = step.seconds(tokens, context)
                    seconds = {key: self.group.slowest(value) for key, value in seconds.items()}
                    row = dict(sums=name, tokens=tokens, context=context, seconds=seconds)
                    rows.append(row | dict(failure=self.comm.peers.failure()))
        return dict(wrong=self.wrong, link=self.comm.peers.link, rows=rows)


def table(result: dict) -> list[str]:
    """Milliseconds, a line for each number of nodes and context."""
    rows = result["ranks"][0]["rows"]
    found = {(row["sums"], row["tokens"], row["context"]): row["seconds"] for row in rows}
    lengths = " to ".join(f"{length:.2f}" for length in LENGTHS)
    lines = [
        "| T | context | verify, ms | without sums | round, ms | without sums |"
        f" tokens/s at {lengths} a round |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (sums, tokens, context), own in found.items():
        if sums == "with":
            bare = found["without", tokens, context]
            cells = [1e3 * s[part] for part in ("verify", "round") for s in (own, bare)]
            each = LENGTHS if tokens > 1 else (1.0,)
            rates = " to ".join(f"{length / own['round']:,.0f}" for length in each)
            middle = " | ".join(f"{cell:.3f}" for cell in cells)
            lines.append(f"| {tokens} | {context:,} | {middle} | {rates} |")
    return lines


def asked(world: int, text: str) -> argparse.Namespace:
    """Options as one text; it ends with an error if they do not fit so many GPUs."""
    parser = argparse.ArgumentParser(prog="bench.step_ranks", description=__doc__.splitlines()[0])
    add_sizes(parser, TOKENS, CONTEXTS)
    parser.add_argument("--shard-latents", action="store_true", help="as of the command")
    options = parser.parse_args(text.split())
    if options.tp % world:
        raise SystemExit(f"bench.step_ranks: --tp {options.tp}: no multiple of {world} GPUs")
    return options


def measure(world: int, options: argparse.Namespace) -> dict:
    """Rows of every rank, as `asked`."""
    ranks = gpu_processes.run(world, options, "bench.step_ranks")
    what = dict(tp=options.tp, layers=options.layers, config=str(options.config or "Kimi K2.6"))
    return what | dict(world=world, shards_latents=options.shard_latents, ranks=ranks)


def title(result: dict) -> str:
    layers = f", {result['layers']} layers" if result["layers"] else ""
    cut = ", latents cut" if result["shards_latents"] else ""
    return f"{result['world']} of {result['tp']} ranks of {result['config']}{layers}{cut}:"


def failures(result: dict) -> list[str]:
    return [row["failure"] for rank in result["ranks"] for row in rank["rows"] if row["failure"]]
