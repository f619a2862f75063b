"""Rounds of one rank, or of all ranks of one process, as CUDA graphs.

A round leaves its successor's state on the device, so while the requests stay the same the next one
starts before the results of this one are read. When they change, the state is written anew.

A plan, a number of requests and a kind of draws have a graph, captured at their second round: the
first plays the operations one by one, which compiles and loads what they need. Graphs run one after
the other and share their memory. A graph writes to memory that was freed while it was captured, so
nothing that is kept from round to round lies there: inputs, draws, constants, workspaces.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddtree_numba import verbs
from ddtree_numba.model.comm import Traffic
from ddtree_numba.model.rank import Ranks
from ddtree_numba.players import Given, Order, Player

MOST_GRAPHS = 64  # kept at a time


@dataclass
class Captured:
    """The rounds of one plan: their state, and their graph from the second on."""

    state: verbs.Round
    played: bool = False
    graph: Any = None
    taps: Any = None  # of every rank, where the graph writes them
    traffic: Traffic = field(default_factory=Traffic)  # of a round


class GraphPlayer(Player):
    """Plays the same as `Player`, and leaves the host free. `ready`: the last round was a graph."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.pool = self.ops.new_pool()  # of rounds alone, played or captured
        self.captured: dict[tuple, Captured] = {}
        self.inputs: dict[int, verbs.Round] = {}  # of so many requests: what graphs read
        self.kept_draws: dict[tuple, Any] = {}
        self.given: Given | None = None  # whose state is on the device
        self.their_draws: dict[int, Any] = {}  # nodes -> entry of `kept_draws`
        self.ready = False

    def begin(self, order: Order) -> verbs.Round:
        plan = order.plan
        with self.ops.active():
            if order.given is not None:
                self.upload(order.given)
            assert self.given is not None
            draws = self.draws(self.given, plan.budget + 1)
        with self.ops.active(self.pool):
            captured = self.prepared(len(self.given.roots), plan, draws)
            if captured.graph is None:
                self.act(captured.state, plan)
                captured.played = True
            else:
                self.ops.launch(captured.graph)
                self.ranks.taps = captured.taps
                self.traffic.add(captured.traffic, Traffic())
                self.played += 1
        return captured.state

    def upload(self, given: Given) -> None:
        """Write what the host knows of requests to where graphs read it."""
        self.given, self.their_draws = None, {}
        new = self.state(given)
        inputs = self.inputs.setdefault(len(given.roots), new)
        if inputs is not new:
            for name in ("roots", "starts", "room", "page_table"):
                getattr(inputs, name)[...] = getattr(new, name)
        self.given = given

    def draws(self, given: Given, nodes: int) -> Any:
        """How these requests draw their tokens, where graphs read it."""
        if nodes not in self.their_draws:
            new = super().draws(given, nodes)
            kept = self.kept_draws.setdefault((len(given.roots), nodes, new.kind), new)
            if kept is not new:
                kept.write(new)
            self.their_draws[nodes] = kept
        return self.their_draws[nodes]

    def prepared(self, requests: int, plan: verbs.Plan, draws: Any) -> Captured:
        """The plan's rounds of so many requests; `ready` if they had their graph already."""
        key = plan, requests, draws.kind
        captured = self.captured.pop(key, None)
        if captured is None:
            captured = Captured(restarted(self.inputs[requests], draws))
            if len(self.captured) == MOST_GRAPHS:
                self.ops.finish()  # the one that is dropped may still run
                del self.captured[next(iter(self.captured))]
        self.captured[key] = captured  # in the order of their last use
        self.ready = captured.graph is not None
        if captured.played and not self.ready:
            self.capture(captured, plan, draws)
        return captured

    def capture(self, captured: Captured, plan: verbs.Plan, draws: Any) -> None:
        """A plan's graph; what it gives to other ranks is counted each time that it runs."""
        captured.state = state = restarted(captured.state, draws)
        counted, played, self.traffic = self.traffic, self.played, captured.traffic
        try:
            captured.graph = self.ops.capture(lambda: self.act(state, plan))
            captured.taps = self.ranks.taps
        finally:
            self.traffic, self.played = counted, played

    def seconds(self, call: Callable[[], object]) -> float:
        """What a call takes as a graph, on the device: the best of three."""
        with self.ops.active(self.pool):
            call()  # compiles and loads
            graph = self.ops.capture(call)
            return min(self.ops.graph_seconds(graph) for _ in range(3))


def restarted(state: verbs.Round, draws: Any) -> verbs.Round:
    """A round that starts from the same arrays."""
    return verbs.Round(state.roots, state.starts, state.room, state.page_table, draws)
