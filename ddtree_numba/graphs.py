"""Rounds as CUDA graphs: the host starts them, and reads what they wrote a round later.

`graph_player` makes and launches the graphs, on every rank. Here rank 0 decides what they start
from, and takes in what they yield.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddtree_numba import verbs
from ddtree_numba.graph_player import GraphPlayer, restarted
from ddtree_numba.players import Order
from ddtree_numba.request import Request
from ddtree_numba.rounds import Flight, Outcome, Rounds, outcomes
from ddtree_numba.spec.tree_accept import Accept
from ddtree_numba.spec.tree_build import Tree

BUDGETS = (1, 2, 4, 8, 16, 32, 64)  # that have a graph where step times choose the tree's size


@dataclass(frozen=True, eq=False)
class Landing(Flight):
    """A round whose results arrive in pinned memory; they are there once `done` has happened."""

    chosen: bool = False  # step times decided the sizes of its trees
    begun: Any = None
    done: Any = None
    faults: Any = None  # what went wrong between ranks


class GraphRounds(Rounds):
    """Rounds on GPUs, one ahead of the host."""

    ahead = 1
    player: GraphPlayer

    def __init__(self, player: GraphPlayer, *args: Any) -> None:
        super().__init__(player, *args)
        self.ops = player.ops
        self.requests: tuple[Request, ...] = ()  # whose state is on the device
        self.largest = BUDGETS[-1]  # nodes beside the root in the last tree of chosen size
        self.under_way: list[Flight] = []  # also those that nobody waits for: copies go to them
        self.busy = 0.0  # seconds of the host since results came in

    def start(self, requests: Sequence[Request], plan: verbs.Plan) -> Flight:
        now, requests, plan = time.perf_counter(), tuple(requests), self.fitted(plan)
        begun = self.ops.mark()
        order = Order(plan, None if requests == self.requests else self.given(requests))
        self.requests = ()  # until all has gone well
        self.announce("play", order)
        state = self.player.play(order)
        self.requests = requests
        timed = self.player.ready
        flight = self.landing(requests, state, plan, begun, timed)
        self.under_way.append(flight)
        if timed:
            self.busy += time.perf_counter() - now
        return flight

    def follows(self, flight: Flight, requests: Sequence[Request]) -> bool:
        """Also: is what the flight leaves still on the device? Others may have come between."""
        latest = self.requests == flight.requests and self.under_way[-1:] == [flight]
        return latest and super().follows(flight, requests)

    def results(self, flight: Flight) -> tuple[list[Outcome], float]:
        """The round took what the host spent, or, if the host was elsewhere, what the GPU did."""
        assert isinstance(flight, Landing)
        now = time.perf_counter()
        self.player.ranks.comm.wait(flight.done)
        self.player.ranks.judge(flight.faults)
        if flight in self.under_way:
            del self.under_way[: self.under_way.index(flight) + 1]
        if flight.chosen:
            self.learn(flight)
        busy, self.busy = self.busy + time.perf_counter() - now, 0.0
        return outcomes(flight), max(busy, self.ops.seconds_between(flight.begun, flight.done))

    def learn(self, flight: Flight) -> None:
        """How large trees become where limits leave room."""
        tree, requests = flight.state.tree, flight.requests
        real = np.arange(tree.depths.shape[1]) < tree.sizes[:, None]
        deepest = np.where(real, tree.depths, 0).max(axis=1)
        free = deepest < [each.room(self.context) for each in requests]
        if free.any():
            self.largest = int(tree.sizes[free].max()) - 1

    def fitted(self, plan: verbs.Plan) -> verbs.Plan:
        """The plan with the smallest budget of a graph that leaves the last tree room to grow.

        A tree of so many nodes has no candidate of a lower rank than that.
        """
        if plan.times is None:
            return plan
        wanted = min(self.largest + 1, BUDGETS[-1])
        budget = next(budget for budget in BUDGETS if budget >= wanted)
        return replace(plan, budget=budget, candidates=min(budget, plan.candidates))

    def landing(
        self,
        requests: tuple[Request, ...],
        state: verbs.Round,
        plan: verbs.Plan,
        begun: Any,
        timed: bool,
    ) -> Landing:
        """Copies of the round's results on their way to the host."""
        fetch = self.ops.fetch
        copied = restarted(state, state.draws)
        copied.tree = Tree(**{name: fetch(array) for name, array in vars(state.tree).items()})
        accepted = vars(state.accepted).items()
        copied.accepted = Accept(**{name: fetch(array) for name, array in accepted})
        copied.tokens = fetch(state.tokens)
        faults, chosen = self.player.ranks.comm.faults, plan.times is not None
        faults = None if faults is None else fetch(faults)
        return Landing(requests, copied, 0.0, timed, chosen, begun, self.ops.mark(), faults)
