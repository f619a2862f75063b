"""Rounds as CUDA graphs: the host starts them, and reads what they wrote a round later.

A round leaves its successor's state on the device, so while the requests stay the same the next one
starts before the results of this one are read. When they change, the state is written anew.

A plan, a number of requests and a kind of draws have a graph, captured at their second round: the
first plays the operations one by one, which compiles and loads what they need. Graphs run one after
the other and share their memory. A graph writes to memory that was freed while it was captured, so
nothing that is kept from round to round lies there: inputs, draws, constants, workspaces.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddtree_numba import verbs
from ddtree_numba.request import Request
from ddtree_numba.rounds import Flight, Outcome, Rounds, outcomes
from ddtree_numba.spec.tree_accept import Accept
from ddtree_numba.spec.tree_build import Tree

BUDGETS = (1, 2, 4, 8, 16, 32, 64)  # that have a graph where step times choose the tree's size
MOST_GRAPHS = 64  # kept at a time


@dataclass
class Captured:
    """The rounds of one plan: their state, and their graph from the second on."""

    state: verbs.Round
    played: bool = False
    graph: Any = None


@dataclass(frozen=True, eq=False)
class Landing(Flight):
    """A round whose results arrive in pinned memory; they are there once `done` has happened."""

    chosen: bool = False  # step times decided the sizes of its trees
    begun: Any = None
    done: Any = None


class GraphRounds(Rounds):
    """Rounds on one GPU, one ahead of the host."""

    ahead = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ops = self.ranks.ops
        self.pool = self.ops.new_pool()  # of rounds alone, played or captured
        self.captured: dict[tuple, Captured] = {}
        self.inputs: dict[int, verbs.Round] = {}  # of so many requests: what graphs read
        self.draws: dict[tuple, Any] = {}
        self.requests: tuple[Request, ...] = ()  # whose state is on the device
        self.their_draws: dict[int, Any] = {}  # nodes -> entry of `draws`
        self.largest = BUDGETS[-1]  # nodes beside the root in the last tree of chosen size
        self.under_way: list[Flight] = []  # also those that nobody waits for: copies go to them
        self.busy = 0.0  # seconds of the host since results came in

    def start(self, requests: Sequence[Request], plan: verbs.Plan) -> Flight:
        now, requests, plan = time.perf_counter(), tuple(requests), self.fitted(plan)
        begun = self.ops.mark()
        with self.ops.active():
            draws = self.loaded(requests, plan)
        with self.ops.active(self.pool):
            captured, timed = self.prepared(len(requests), plan, draws)
            if captured.graph is None:
                verbs.play(captured.state, self.ranks, plan)
                captured.played = True
            else:
                self.ops.launch(captured.graph)
            flight = self.landing(requests, captured.state, plan, begun, timed)
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
        flight.done.synchronize()
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

    def seconds(self, call: Callable[[], object]) -> float:
        """What a call takes as a graph, on the device: the best of three."""
        with self.ops.active(self.pool):
            call()  # compiles and loads
            graph = self.ops.capture(call)
            return min(self.ops.graph_seconds(graph) for _ in range(3))

    def fitted(self, plan: verbs.Plan) -> verbs.Plan:
        """The plan with the smallest budget of a graph that leaves the last tree room to grow."""
        if plan.times is None:
            return plan
        wanted = min(self.largest + self.largest // 4 + 1, BUDGETS[-1])
        return replace(plan, budget=next(budget for budget in BUDGETS if budget >= wanted))

    def loaded(self, requests: tuple[Request, ...], plan: verbs.Plan) -> Any:
        """State of these requests on the device -> how they draw their tokens."""
        if requests != self.requests:
            self.upload(requests, plan)
        return self.draws_of(requests, plan.budget + 1)

    def prepared(self, requests: int, plan: verbs.Plan, draws: Any) -> tuple[Captured, bool]:
        """The plan's rounds of so many requests, and whether they had their graph already."""
        key = plan, requests, draws.kind
        captured = self.captured.pop(key, None)
        if captured is None:
            captured = Captured(replace_inputs(self.inputs[requests], draws))
            if len(self.captured) == MOST_GRAPHS:
                self.ops.finish()  # the one that is dropped may still run
                del self.captured[next(iter(self.captured))]
        self.captured[key] = captured  # in the order of their last use
        ready = captured.graph is not None
        if captured.played and not ready:
            captured.state = replace_inputs(captured.state, draws)
            state = captured.state
            captured.graph = self.ops.capture(lambda: verbs.play(state, self.ranks, plan))
        return captured, ready

    def upload(self, requests: tuple[Request, ...], plan: verbs.Plan) -> None:
        """Write what the host knows of these requests to where graphs read it."""
        new = self.state(requests, plan)
        inputs = self.inputs.setdefault(len(requests), new)
        if inputs is not new:
            for name in ("roots", "starts", "room", "page_table"):
                getattr(inputs, name)[...] = getattr(new, name)
        self.requests, self.their_draws = requests, {}

    def draws_of(self, requests: tuple[Request, ...], nodes: int) -> Any:
        """How these requests draw their tokens, where graphs read it."""
        if nodes not in self.their_draws:
            params, seeds = [r.params for r in requests], [r.seed for r in requests]
            new = self.ops.draws(params, seeds, nodes)
            kept = self.draws.setdefault((len(requests), nodes, new.kind), new)
            if kept is not new:
                kept.write(new)
            self.their_draws[nodes] = kept
        return self.their_draws[nodes]

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
        copied = replace_inputs(state, state.draws)
        copied.tree = Tree(**{name: fetch(array) for name, array in vars(state.tree).items()})
        accepted = vars(state.accepted).items()
        copied.accepted = Accept(**{name: fetch(array) for name, array in accepted})
        copied.tokens = fetch(state.tokens)
        chosen = plan.times is not None
        return Landing(requests, copied, 0.0, timed, chosen, begun, self.ops.mark())


def replace_inputs(state: verbs.Round, draws: Any) -> verbs.Round:
    """A round that starts from the same arrays."""
    return verbs.Round(state.roots, state.starts, state.room, state.page_table, draws)
