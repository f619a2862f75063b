"""Rounds over the active requests: what goes in, what comes back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddtree_numba import verbs
from ddtree_numba.budget import WIDTHS, StepTimes
from ddtree_numba.model.cache import PAGE
from ddtree_numba.model.comm import Traffic
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.rank import Ranks
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
    as the requests stay the same. `traffic` is what a rank gave to others in `played` rounds.
    """

    ahead = 0

    def __init__(self, ranks: Ranks, page_rows: np.ndarray, context: int) -> None:
        self.ranks, self.page_rows, self.context = ranks, page_rows, context
        self.traffic, self.played = Traffic(), 0

    def start(self, requests: Sequence[Request], plan: verbs.Plan) -> Flight:
        """Play a round of these requests."""
        begun = time.perf_counter()
        state = self.state(requests, plan)
        before = replace(self.ranks.traffic)
        self.play(state, plan)
        self.traffic.add(self.ranks.traffic, before)
        self.played += 1
        return Flight(tuple(requests), state, time.perf_counter() - begun)

    def play(self, state: verbs.Round, plan: verbs.Plan) -> None:
        """The five verbs, here or wherever ranks are."""
        with self.ranks.ops.active():
            verbs.play(state, self.ranks, plan)

    def follows(self, flight: Flight, requests: Sequence[Request]) -> bool:
        """May a round of these requests start before the results of the flight are known?"""
        return flight.requests == tuple(requests)

    def results(self, flight: Flight) -> tuple[list[Outcome], float]:
        """What the round yields, request by request, and the seconds that it took.

        Time that passes between calls, for prompts or with the caller, is no round's.
        """
        return outcomes(flight), flight.seconds

    def seconds(self, call: Callable[[], object]) -> float:
        """What a call takes: the best of three."""
        spans = []
        for _ in range(3):
            begin = time.perf_counter()
            call()
            spans.append(time.perf_counter() - begin)
        return min(spans)

    def step_times(self, slot: int) -> StepTimes:
        """Seconds of a draft and of verify steps by width, on a slot that holds a page of text."""
        ops = self.ranks.ops
        host = np.zeros(1, np.int32), np.array([PAGE], np.int32), self.page_rows[slot : slot + 1]
        root, start, table = map(ops.array, host)
        chains = {
            rows: ops.placed(VerifyInput.of_chain(np.zeros(rows, np.int32), PAGE, host[2]))
            for rows in WIDTHS
        }
        return StepTimes.measure(
            lambda: self.ranks.draft(root, start, table),
            lambda rows: self.ranks.verify(chains[rows], True),
            self.seconds,
        )

    def state(self, requests: Sequence[Request], plan: verbs.Plan) -> verbs.Round:
        """A round's state before its first verb, where the operations read it."""
        ops = self.ranks.ops
        return verbs.Round(
            roots=ops.array(np.array([request.root for request in requests], np.int32)),
            starts=ops.array(np.array([request.length for request in requests], np.int32)),
            room=ops.array(np.array([r.room(self.context) for r in requests], np.int32)),
            page_table=ops.array(self.page_rows[[request.slot for request in requests]]),
            draws=ops.draws(
                [request.params for request in requests],
                [request.seed for request in requests],
                plan.budget + 1,
            ),
        )
