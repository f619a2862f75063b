"""What every rank does in a round: rank 0 decides and orders it, all ranks play it alike.

An `Order` carries all that decides a round's outcome. So ranks that are other processes need no
prompts, clock, terminal or randomness, and can come to no other end, limit or budget.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddtree_numba import verbs
from ddtree_numba.budget import WIDTHS, StepTimes
from ddtree_numba.model.cache import PAGE
from ddtree_numba.model.comm import Traffic
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.rank import Ranks
from ddtree_numba.sampling import SamplingParams


@dataclass(frozen=True)
class Given:
    """What the host knows of requests: `verbs.Round` before its first verb, and how they draw."""

    roots: np.ndarray
    starts: np.ndarray
    room: np.ndarray
    page_table: np.ndarray
    params: tuple[SamplingParams, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """A round to be played; `given` None: of the requests of the round before, as it left them."""

    plan: verbs.Plan
    given: Given | None


class Player:
    """Plays rounds verb by verb. `traffic` is what a rank gave to the others in `played` rounds.

    `machine` says where step times stay the same from run to run; None: they do not.
    """

    machine: str | None = None

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.ops = ranks, ranks.ops
        self.traffic, self.played = Traffic(), 0
        self.after: Callable[[verbs.Round], None] | None = None  # called with every round

    def play(self, order: Order) -> verbs.Round:
        """The round, as far as the host has played it."""
        state = self.begin(order)
        if self.after is not None:
            self.after(state)
        return state

    def begin(self, order: Order) -> verbs.Round:
        """Play or start it."""
        assert order.given is not None
        state = self.state(order.given)
        state.draws = self.draws(order.given, order.plan.budget + 1)
        with self.ops.active():
            self.act(state, order.plan)
        return state

    def act(self, state: verbs.Round, plan: verbs.Plan) -> None:
        """The five verbs; their traffic is counted."""
        before = replace(self.ranks.traffic)
        verbs.play(state, self.ranks, plan)
        self.traffic.add(self.ranks.traffic, before)
        self.played += 1

    def state(self, given: Given) -> verbs.Round:
        """A round before its first verb, where the operations read it."""
        place = self.ops.array
        context = place(given.room), place(given.page_table)
        return verbs.Round(place(given.roots), place(given.starts), *context, draws=None)

    def draws(self, given: Given, nodes: int) -> Any:
        """How requests draw their tokens, where the operations read it."""
        return self.ops.draws(given.params, given.seeds, nodes)

    def seconds(self, call: Callable[[], object]) -> float:
        """What a call takes: the best of three."""
        spans = []
        for _ in range(3):
            begin = time.perf_counter()
            call()
            spans.append(time.perf_counter() - begin)
        return min(spans)

    def step_times(self, pages: np.ndarray) -> StepTimes:
        """Seconds of a draft and of verify steps by width, on pages [1,M] with a page of text."""
        host = np.zeros(1, np.int32), np.array([PAGE], np.int32), pages
        root, start, table = map(self.ops.array, host)
        chains = {
            rows: self.ops.placed(VerifyInput.of_chain(np.zeros(rows, np.int32), PAGE, pages))
            for rows in WIDTHS
        }
        return StepTimes.measure(
            lambda: self.ranks.candidates(root, start, table, verbs.CANDIDATES),
            lambda rows: self.ranks.score(chains[rows], True),
            self.seconds,
        )


def player_of(ranks: Ranks) -> Player:
    """As the ranks' backend asks for."""
    if ranks.ops.name != "cuda":
        return Player(ranks)
    from ddtree_numba.graph_player import GraphPlayer

    player = GraphPlayer(ranks)
    player.machine = f"{ranks.ops.device}; {ranks.comm.world} ranks, {ranks.comm.link}"
    return player
