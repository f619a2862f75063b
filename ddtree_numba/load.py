"""From a checkpoint folder to ranks that can run."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ddtree_numba.backends import open_backends
from ddtree_numba.model.backend import Backend
from ddtree_numba.model.cache import Cache
from ddtree_numba.model.comm import Comm, SingleRank, ThreadGroup
from ddtree_numba.model.config import (
    DrafterConfig,
    ModelConfig,
    check_pair,
    load_config,
    load_drafter_config,
)
from ddtree_numba.model.drafter import Drafter
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.model.loader import load_drafter, load_target
from ddtree_numba.model.packed import Packed
from ddtree_numba.model.rank import Rank, Ranks
from ddtree_numba.model.sharding import check_tp
from ddtree_numba.model.target import Target
from ddtree_numba.model.weights import DrafterWeights, TargetWeights
from ddtree_numba.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parent / "tiny"


@dataclass(frozen=True)
class Sources:
    """Where a rank reads a checkpoint and its drafter, and where it keeps packed weights."""

    folder: Path
    drafter: str | Path | None = None
    cache: str | Path | None = None


@dataclass(frozen=True)
class Setup:
    """How a checkpoint is run: by all ranks alike."""

    backend: str = "auto"
    tp: int = 1
    dtype: str = "bfloat16"
    shard_latents: bool = False
    fast_allreduce: bool = False


@dataclass
class Loaded:
    """A checkpoint in memory: `weights` of each rank of this process, target and drafter.

    `comm` is that of the one rank, if the others are other processes.
    """

    config: ModelConfig
    drafter_config: DrafterConfig | None
    tokenizer: Tokenizer
    weights: list[tuple[TargetWeights, DrafterWeights | None]]
    backends: list[Backend]
    seconds: float
    comm: Comm | None = None

    def build(self, pages: int, slots: int, nodes: int, positions: int) -> Ranks:
        """Ranks with a cache of `pages` pages, `slots` requests and `nodes` tree rows a request."""
        group = group_of(self.backends)
        comms: list[Comm] = list(group.comms) if group else [self.comm or SingleRank()]
        ranks = []
        for comm, ops, (target, drafter) in zip(comms, self.backends, self.weights, strict=True):
            ops.reserve(positions)
            held = pages, slots * nodes, ops.zeros
            cache = Cache(self.config, self.drafter_config, comm.world, *held)
            draft_model = None
            if drafter is not None and self.drafter_config is not None:
                draft_model = Drafter(self.drafter_config, drafter, ops, comm)
            ranks.append(Rank(Target(self.config, target, ops, comm), draft_model, cache, ops))
        return Ranks(ranks, group)


def group_of(backends: list[Backend]) -> ThreadGroup | None:
    """The ranks of this process as a group, if there are several."""
    if len(backends) == 1:
        return None
    if backends[0].name != "cuda":
        return ThreadGroup(len(backends))
    from ddtree_numba.model.comm_streams import StreamGroup

    return StreamGroup(backends)


def check_block(drafter: DrafterConfig) -> None:
    """CheckpointError if the drafter's block has more rows than cuda's attention takes."""
    from ddtree_numba.kernels.draft_attention import MOST_ROWS  # there with cuda alone

    shared = drafter.num_attention_heads // drafter.num_key_value_heads
    most = MOST_ROWS // shared
    if drafter.block_size > most:
        raise CheckpointError(
            f"drafter block_size {drafter.block_size}: backend 'cuda' takes up to {most} with"
            f" {shared} heads to a key head; use 'numpy'"
        )


def drafter_folder(folder: Path, drafter: str | Path | None) -> Path | None:
    """Where the drafter is: as named, else the model's subfolder `drafter`; None without one."""
    if drafter is not None:
        return Path(drafter)
    inside = folder / "drafter"
    return inside if (inside / "config.json").is_file() else None


def load_checkpoint(
    sources: Sources,
    setup: Setup,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
    comm: Comm | None = None,
    device: int | None = None,
) -> Loaded:
    """Read configuration, tokenizer and every rank's weights, or those of the rank of `comm`.

    Without `comm` the ranks are threads, with cuda all on one GPU; with it, the rank is on GPU
    `device`. Packed weights are read from the folder `sources.cache`, or written there. note(line)
    says why not, and why backend `auto` is not cuda.
    Raises CheckpointError or ValueError, in one line.
    """
    begin = time.perf_counter()
    note = note or _complain
    folder, tp = sources.folder, setup.tp
    numbers = range(tp) if comm is None else [comm.rank]
    backends = open_backends(setup.backend, setup.dtype, len(numbers), note, device)
    ops = backends[0]
    config = replace(load_config(folder), shards_latents=setup.shard_latents and tp > 1)
    draft_folder = drafter_folder(folder, sources.drafter)
    drafter_config = load_drafter_config(draft_folder) if draft_folder is not None else None
    if drafter_config is not None:
        check_pair(config, drafter_config, folder, draft_folder)
    check_tp(config, tp, drafter_config)
    if ops.name == "cuda" and drafter_config is not None:
        check_block(drafter_config)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size < config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens,"
            f" config.json a vocab_size of {config.vocab_size}"
        )
    packed = None
    if sources.cache is not None:
        packed = Packed(Path(sources.cache), ops.name, ops.keep, note)
    weights = []
    for rank, ops in zip(numbers, backends, strict=True):
        report = partial(_share, progress, rank, tp) if progress and comm is None else progress
        target = load_target(folder, config, rank, tp, ops.place, report, packed)
        draft = None
        if draft_folder is not None and drafter_config is not None:
            named = draft_folder, drafter_config, rank, tp
            draft = load_drafter(*named, ops.place, packed=packed)
        weights.append((target, draft))
        ops.placed_all()
    seconds = time.perf_counter() - begin
    return Loaded(config, drafter_config, tokenizer, weights, backends, seconds, comm)


def _complain(line: str) -> None:
    print(line, file=sys.stderr)


def _share(progress: Callable[[int, int], None], rank: int, tp: int, done: int, total: int) -> None:
    """Progress of one rank's share as part of all ranks'."""
    progress(rank * total + done, tp * total)
