"""Ranks as processes: rank 0 runs the command, the others play what it announces.

Only rank 0 reads prompts, draws seeds, hears signals, and decides what is played next; before it
plays it, it announces it with all that decides its outcome, its own step times among them. So ranks
cannot come to disagree about an end, a limit or a budget, and need no terminal, clock or
randomness. They do play whole rounds, up to the accepted tokens, from sums and gathers that are
equal bit for bit: with DDTREE_NUMBA_CHECK_RANKS=N they compare, every N rounds, what they hold.
"""

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from ddtree_numba import verbs, wire
from ddtree_numba.backends import MOST_GPUS, Note, gpu_of, name_of, silent
from ddtree_numba.engine import Engine
from ddtree_numba.fingerprint import fingerprint
from ddtree_numba.load import Loaded, Setup, Sources, load_checkpoint
from ddtree_numba.model.comm_tcp import RankError
from ddtree_numba.model.numa import bind
from ddtree_numba.model.place import check_every, gpus_are_shared
from ddtree_numba.model.rank import Rank, Ranks
from ddtree_numba.model.watch import ProcessGroup
from ddtree_numba.players import Player, player_of
from ddtree_numba.rounds import Rounds, rounds_of

VERBS = ("forward", "verify", "commit")  # of `Ranks`, called outside of rounds
ORDERS = ("play", "step_times")  # of a `Player`


class Comparison:
    """Every so many rounds: does every rank hold the same tree, tokens and hidden states?"""

    def __init__(self, group: ProcessGroup, rank: Rank, every: int) -> None:
        self.group, self.rank, self.every = group, rank, every
        self.rounds = 0

    def after(self, state: verbs.Round) -> None:
        self.rounds += 1
        if self.rounds % self.every:
            return
        ops, digest = self.rank.ops, hashlib.blake2b(digest_size=16)
        held = [*vars(state.tree).values(), *vars(state.accepted).values()]
        for array in (*held, state.target_tokens, state.tokens, self.rank.taps):
            digest.update(np.ascontiguousarray(ops.host(array)).tobytes())
        given = self.group.comm.gather(digest.digest())
        others = [str(rank) for rank, one in enumerate(given) if one != given[0]]
        if others:
            raise RankError(
                f"round {self.rounds}: rank {', '.join(others)} holds other tokens or hidden states"
                " than rank 0"
            )


class LeadingRanks(Ranks):
    """Rank 0, which announces every call to the others."""

    def __init__(self, rank: Rank, group: ProcessGroup) -> None:
        super().__init__([rank], None)
        self.alone, self.processes = Ranks([rank], None), group

    def _all(self, verb: str, *args: object) -> Any:
        self.announce(verb, *args)
        return super()._all(verb, *args)

    def announce(self, name: str, *args: object) -> None:
        self.processes.comm.broadcast(wire.encode((name, *args)))


class LeadingEngine(Engine):
    """The engine of rank 0."""

    ranks: LeadingRanks

    def _rounds(self) -> Rounds:
        player = compared(self.ranks.alone, self.ranks.processes, check_every())
        return rounds_of(player, self.pages.rows, self.context, self.ranks.announce)


@dataclass
class Led(Loaded):
    """Rank 0's share of a checkpoint."""

    group: ProcessGroup | None = None

    def build(self, *sizes: int) -> Ranks:
        assert self.group is not None
        self.group.comm.broadcast(wire.encode(sizes))
        ranks = super().build(*sizes)
        self.group.comm.barrier()  # others may still be reading
        return LeadingRanks(ranks.ranks[0], self.group)


def compared(ranks: Ranks, group: ProcessGroup, every: int) -> Player:
    """A player whose rounds are compared with the other ranks'."""
    player = player_of(ranks)
    if every:
        player.after = Comparison(group, ranks.ranks[0], every).after
    return player


def load(
    group: ProcessGroup,
    sources: Sources,
    setup: Setup,
    max_batch: int,
    max_context: int | None,
    progress: Callable[[int, int], None],
    note: Note,
) -> Engine:
    """`Engine.load` over the ranks of a group; on rank 0."""
    printed = fingerprint(sources.folder, sources.drafter)
    group.comm.broadcast(wire.encode((printed, check_every(), astuple(setup))))
    loaded = load_rank(group, sources, setup, progress, note)
    return LeadingEngine(Led(**vars(loaded), group=group), max_batch, max_context)


def load_rank(
    group: ProcessGroup,
    sources: Sources,
    setup: Setup,
    progress: Callable[[int, int], None],
    note: Note | None = None,
) -> Loaded:
    """A rank's share of a checkpoint, and what connects it with the others."""
    backend = agreed_backend(group, setup.backend, setup.dtype, note or silent)
    setup = replace(setup, backend=backend, tp=group.world)
    device = group.place.local_rank if backend == "cuda" else None
    if setup.fast_allreduce and backend != "cuda":
        raise ValueError(f"--fast-allreduce has no effect with backend {backend}")
    loaded = load_checkpoint(sources, setup, progress, note, group.comm, device)
    if backend == "cuda":
        from ddtree_numba.model.comm_cuda import connected

        (ops,) = loaded.backends
        bind(ops.bus_id)
        width = loaded.config.hidden_size
        loaded.comm = connected(group, ops, width, setup.fast_allreduce, note or silent)
    return loaded


def agreed_backend(group: ProcessGroup, backend: str, dtype: str, note: Note) -> str:
    """What a backend's name means for all ranks; cuda only if each has a GPU of its own.

    ValueError, on all ranks, if cuda was asked for; else note(line) says why it is numpy.
    """
    cuda = name_of(backend, dtype) == "cuda"
    gpus = group.comm.gather(gpu_of(group.place.local_rank).encode() if cuda else b"")
    own, most = len(set(gpus) - {b""}), 1 if gpus_are_shared() else group.world
    if all(gpus) and own >= most and group.world <= MOST_GPUS:
        return "cuda"
    short = f"{group.world} ranks, {own} GPU{'s' * (own != 1)} between them"
    if group.world > MOST_GPUS:
        short = f"{group.world} ranks, {MOST_GPUS} at most"
    if backend == "cuda":
        raise ValueError(f"backend 'cuda': {short}")
    if own:
        note(f"{short}; numpy is used instead")
    return "numpy"


def follow(group: ProcessGroup, sources: Sources) -> None:
    """What every other rank does, until rank 0 takes leave; RankLost if it does not."""
    comm, announced = group.comm, group.comm.broadcast()
    if not announced:
        return  # nothing had to be decoded
    printed, every, how = wire.decode(announced)
    if printed != fingerprint(sources.folder, sources.drafter):
        raise ValueError(
            f"{sources.folder} or its drafter holds another configuration, vocabulary or weights"
            " than rank 0's"
        )
    loaded = load_rank(group, sources, Setup(*how), lambda *_: group.alive())
    ranks = loaded.build(*wire.decode(comm.broadcast()))
    comm.barrier()
    player = compared(ranks, group, every)
    while announced := comm.broadcast():
        verb, *args = wire.decode(announced)
        assert verb in VERBS or verb in ORDERS, verb
        getattr(player if verb in ORDERS else ranks, verb)(*args)
