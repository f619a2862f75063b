"""From a checkpoint folder to ranks that can run; here backend and rank count are chosen."""

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddtree_numba.model.backend import Backend, NumpyBackend
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
BACKENDS = ("auto", "numpy", "cuda")
CUDA_DOES = ("bfloat16", 1)  # dtype, number of ranks


@dataclass
class Loaded:
    """A checkpoint in memory: `weights` of each rank of this process, target and drafter.

    `comm` is that of the one rank, if the others are other processes.
    """

    config: ModelConfig
    drafter_config: DrafterConfig | None
    tokenizer: Tokenizer
    weights: list[tuple[TargetWeights, DrafterWeights | None]]
    ops: Backend
    seconds: float
    comm: Comm | None = None

    def build(self, pages: int, slots: int, nodes: int) -> Ranks:
        """Ranks with a cache of `pages` pages, `slots` requests and `nodes` tree rows a request."""
        group = ThreadGroup(len(self.weights)) if len(self.weights) > 1 else None
        comms: list[Comm] = list(group.comms) if group else [self.comm or SingleRank()]
        ranks = []
        for comm, (target, drafter) in zip(comms, self.weights, strict=True):
            cache = Cache(
                self.config, self.drafter_config, comm.world, pages, slots * nodes, self.ops.zeros
            )
            draft_model = None
            if drafter is not None and self.drafter_config is not None:
                draft_model = Drafter(self.drafter_config, drafter, self.ops, comm)
            ranks.append(
                Rank(Target(self.config, target, self.ops, comm), draft_model, cache, self.ops)
            )
        return Ranks(ranks, group)


def has_driver() -> bool:
    """Whether a machine is worth a try with cuda, before anything of it is imported."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def choose_backend(
    backend: str, dtype: str, tp: int, note: Callable[[str], None] = lambda line: None
) -> Backend:
    """The operations to run on. `auto` is cuda where it can run, else numpy.

    note(line) says why cuda does not run although there is a driver. ValueError, in one line, for a
    backend that is unknown or cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "auto":
        if (dtype, tp) != CUDA_DOES or not has_driver():
            return NumpyBackend(dtype)
        try:
            return choose_backend("cuda", dtype, tp)
        except ValueError as error:
            note(f"{error}; numpy is used instead")
            return NumpyBackend(dtype)
    if backend == "numpy":
        return NumpyBackend(dtype)
    if (dtype, tp) != CUDA_DOES:
        raise ValueError(
            f"backend 'cuda' computes in bfloat16 on one rank, not in {dtype} on {tp}: use 'numpy'"
        )
    try:
        from ddtree_numba.model.cuda_backend import CudaBackend

        return CudaBackend()
    except (ImportError, RuntimeError) as error:  # no packages; no device, driver or compiler
        missing = isinstance(error, ImportError)
        advice = "; install the extra cu13: pip install '.[cu13]'" if missing else ""
        raise ValueError(f"backend 'cuda': {error}{advice}") from None


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
    folder: str | Path,
    drafter: str | Path | None,
    backend: str,
    tp: int,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
    comm: Comm | None = None,
    cache: str | Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Loaded:
    """Read configuration, tokenizer and every rank's weights, or those of the rank of `comm`.

    Packed weights are read from the folder `cache`, or written there. note(line) says why not, and
    why `auto` is not cuda.
    Raises CheckpointError or ValueError, in one line.
    """
    begin = time.perf_counter()
    note = note or _complain
    ops = choose_backend(backend, dtype, tp, note)
    folder = Path(folder)
    config = load_config(folder)
    draft_folder = drafter_folder(folder, drafter)
    drafter_config = load_drafter_config(draft_folder) if draft_folder is not None else None
    if drafter_config is not None:
        check_pair(config, drafter_config)
    check_tp(config, tp, drafter_config)
    if ops.name == "cuda" and drafter_config is not None:
        check_block(drafter_config)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size < config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens,"
            f" config.json a vocab_size of {config.vocab_size}"
        )
    packed = None if cache is None else Packed(Path(cache), ops.name, ops.keep, note)
    weights = []
    for rank in range(tp) if comm is None else [comm.rank]:
        report = partial(_share, progress, rank, tp) if progress and comm is None else progress
        target = load_target(folder, config, rank, tp, ops.place, report, packed)
        draft = None
        if draft_folder is not None and drafter_config is not None:
            named = draft_folder, drafter_config, rank, tp
            draft = load_drafter(*named, ops.place, packed=packed)
        weights.append((target, draft))
    ops.placed_all()
    seconds = time.perf_counter() - begin
    return Loaded(config, drafter_config, tokenizer, weights, ops, seconds, comm)


def _complain(line: str) -> None:
    print(line, file=sys.stderr)


def _share(progress: Callable[[int, int], None], rank: int, tp: int, done: int, total: int) -> None:
    """Progress of one rank's share as part of all ranks'."""
    progress(rank * total + done, tp * total)
