"""Rounds over the active requests: what goes in, what comes back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_numba import verbs
from ddtree_numba.budget import StepTimes
from ddtree_numba.players import Given, Order, Player
from ddtree_numba.request import Request, RoundTrace
from ddtree_numba.spec.tree_accept import Accept
from ddtree_numba.spec.tree_build import Tree


@dataclass(frozen=True)
class Outcome:
    """One request's round: its tree, its accepted path, and the tokens that it yields."""

    tree: Tree
    accepted: Accept
    reported: np.ndarray
    row: int

    @property
    def count(self) -> int:
        """Positions that were committed: the root, and every accepted node."""
        return int(self.accepted.counts[self.row])

    @property
    def tokens(self) -> list[int]:
        """The accepted nodes' tokens, then the next token."""
        return self.reported[self.row, : self.count].tolist()

    def trace(self, emitted: int) -> RoundTrace:
        """Tree and path for display."""
        row, size = self.row, int(self.tree.sizes[self.row])
        return RoundTrace(
            tokens=self.tree.tokens[row, :size].copy(),  # the round's memory may be pinned
            parents=self.tree.parents[row, :size].copy(),
            scores=self.tree.scores[row, :size].copy(),
            size=size,
            accepted=self.accepted.nodes[row, : self.count].tolist(),
            next_token=int(self.accepted.next_tokens[row]),
            emitted=emitted,
        )


@dataclass(frozen=True, eq=False)
class Flight:
    """A round that was started: its requests, and what it will have written."""

    requests: tuple[Request, ...]
    state: verbs.Round
    seconds: float  # that the host spent on it
    timed: bool = True  # not a round in which a graph was made ready


def outcomes(flight: Flight) -> list[Outcome]:
    """What a round that has ended yields, request by request."""
    state = flight.state
    rows = range(len(flight.requests))
    return [Outcome(state.tree, state.accepted, state.tokens, row) for row in rows]


class Rounds:
    """Starts rounds and hands out their results, in the same order.

    `ahead` is how many rounds may be started before the result of the first is asked for, as long
    as the requests stay the same. `announce(name, argument)` tells ranks that are other processes
    which of the player's methods is called next, and with what.
    """

    ahead = 0

    def __init__(
        self,
        player: Player,
        page_rows: np.ndarray,
        context: int,
        announce: Callable[[str, Any], None] = lambda name, argument: None,
    ) -> None:
        self.player, self.page_rows, self.context = player, page_rows, context
        self.announce = announce

    def start(self, requests: Sequence[Request], plan: verbs.Plan) -> Flight:
        """Play a round of these requests."""
        begun = time.perf_counter()
        order = Order(plan, self.given(requests))
        self.announce("play", order)
        state = self.player.play(order)
        return Flight(tuple(requests), state, time.perf_counter() - begun)

    def given(self, requests: Sequence[Request]) -> Given:
        """What the host knows of these requests."""
        return Given(
            roots=np.array([request.root for request in requests], np.int32),
            starts=np.array([request.length for request in requests], np.int32),
            room=np.array([request.room(self.context) for request in requests], np.int32),
            page_table=self.page_rows[[request.slot for request in requests]],
            params=tuple(request.params for request in requests),
            seeds=tuple(request.seed for request in requests),
        )

    def follows(self, flight: Flight, requests: Sequence[Request]) -> bool:
        """May a round of these requests start before the results of the flight are known?"""
        return flight.requests == tuple(requests)

    def results(self, flight: Flight) -> tuple[list[Outcome], float]:
        """What the round yields, request by request, and the seconds that it took.

        Time that passes between calls, for prompts or with the caller, is no round's.
        """
        return outcomes(flight), flight.seconds

    def step_times(self, slot: int) -> StepTimes:
        """See `Player.step_times`; on a slot that holds a page of text."""
        pages = self.page_rows[slot : slot + 1].copy()
        self.announce("step_times", pages)
        return self.player.step_times(pages)


def rounds_of(player: Player, *args: Any) -> Rounds:
    """As the player's backend asks for."""
    from ddtree_numba.graph_player import GraphPlayer
    from ddtree_numba.graphs import GraphRounds

    if isinstance(player, GraphPlayer):
        return GraphRounds(player, *args)
    return Rounds(player, *args)
