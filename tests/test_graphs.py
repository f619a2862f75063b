"""Rounds as graphs, a round ahead of the host, with numpy in place of the device.

A stand-in of a graph plays its verbs when it is launched. What is tested is all that stays the
same on a GPU: which state a round starts from, when it is written anew, who reads what and when.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_numba.engine import Engine
from ddtree_numba.graph_player import GraphPlayer
from ddtree_numba.graphs import BUDGETS, GraphRounds
from ddtree_numba.model.backend import NumpyBackend
from ddtree_numba.sampling import SamplingParams
from tests.scripted import count_up, scripted_engine, some_right

POISON = -77


class Draws(list):
    """Parameters and seeds of requests, to be overwritten in place."""

    @property
    def kind(self) -> tuple:
        return (any(params.temperature > 0 for params, _ in self),)

    def write(self, other: "Draws") -> None:
        self[:] = other


class Device(NumpyBackend):
    """numpy with what graphs ask of a device; results come in only when they are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.round_seconds = 0.0
        self.late: list = []  # (array that waits for its values, values)

    def draws(self, params, seeds, nodes):
        return Draws(super().draws(params, seeds, nodes))

    def active(self, pool=None):
        return super().active()

    def new_pool(self):
        return None

    def capture(self, call):
        return call

    def launch(self, graph) -> None:
        self.launches += 1
        graph()

    def graph_seconds(self, graph) -> float:
        graph()
        return 1.0

    def fetch(self, array: np.ndarray) -> np.ndarray:
        late = np.full_like(array, POISON)
        self.late.append((late, array.copy()))
        return late

    def mark(self):
        arrived, self.late = self.late, []

        def synchronize() -> None:
            for late, value in arrived:
                late[...] = value

        return SimpleNamespace(synchronize=synchronize)

    def seconds_between(self, begin, end) -> float:
        return self.round_seconds


def ahead(engine: Engine) -> Engine:
    engine.ranks.ops = Device()
    engine.rounds = GraphRounds(GraphPlayer(engine.ranks), engine.pages.rows, engine.context)
    return engine


def decode(engine: Engine, prompts, params, mode="ddtree", budget=16):
    answers = [[] for _ in prompts]
    reasons = [None] * len(prompts)
    for one in engine.generate(prompts, params, mode, budget):
        answers[one.index] += one.token_ids
        reasons[one.index] = one.finish_reason or reasons[one.index]
    return answers, reasons


PROMPTS = [[30], [41, 5], [7, 8, 9], [60], [61, 3], [12], [100, 2], [33]]


@pytest.mark.parametrize("mode", ["ddtree", "chain", "ar"])
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_answers_are_those_of_rounds_one_by_one(mode, max_batch):
    params = [SamplingParams(max_new_tokens=3 + 7 * i) for i in range(len(PROMPTS))]
    plain = scripted_engine(count_up, some_right, max_batch=max_batch)
    graphs = ahead(scripted_engine(count_up, some_right, max_batch=max_batch))
    for _ in range(2):  # the second time every graph is known
        assert decode(graphs, PROMPTS, params, mode) == decode(plain, PROMPTS, params, mode)
    assert graphs.ranks.ops.launches > 0
    assert graphs.pages.free_pages == plain.pages.free_pages


def test_drawn_tokens_follow_their_own_requests_from_graph_to_graph():
    def spread(prefix):
        return np.cos(np.arange(256) * (1 + sum(prefix) % 7)).astype(np.float32) * 3

    params = [
        SamplingParams(temperature=1.0 if i % 3 else 0.0, max_new_tokens=5 + i, seed=i)
        for i in range(len(PROMPTS))
    ]
    plain = scripted_engine(spread, some_right, max_batch=3)
    graphs = ahead(scripted_engine(spread, some_right, max_batch=3))
    assert decode(graphs, PROMPTS, params) == decode(plain, PROMPTS, params)
    assert decode(graphs, PROMPTS[::-1], params) == decode(plain, PROMPTS[::-1], params)


def test_a_stop_costs_a_round_and_no_token():
    graphs = ahead(scripted_engine(count_up, some_right, eos=(55,)))
    plain = scripted_engine(count_up, some_right, eos=(55,))
    params = SamplingParams(max_new_tokens=200)
    assert decode(graphs, PROMPTS, params) == decode(plain, PROMPTS, params)
    assert decode(graphs, PROMPTS, params)[1].count("stop") == len(PROMPTS)


def test_a_cancelled_answer_leaves_nothing_behind():
    graphs = ahead(scripted_engine(count_up, some_right, max_batch=2))
    free = graphs.pages.free_pages
    for _ in range(3):
        answer = graphs.generate(PROMPTS, SamplingParams(max_new_tokens=50), "ddtree", 16)
        for _ in range(5):
            next(answer)
        answer.close()
        assert graphs.pages.free_pages == free
    plain = scripted_engine(count_up, some_right, max_batch=2)
    params = SamplingParams(max_new_tokens=50)
    assert decode(graphs, PROMPTS, params) == decode(plain, PROMPTS, params)


def test_budget_auto_takes_the_smallest_graph_that_lets_the_tree_grow():
    graphs = ahead(scripted_engine(count_up, some_right))
    assert decode(graphs, PROMPTS, SamplingParams(max_new_tokens=40), budget="auto")
    budgets = {key[0].budget for key in graphs.rounds.player.captured}
    assert budgets <= {0, *BUDGETS}
    graphs.rounds.largest = 5
    plan = next(key[0] for key in graphs.rounds.player.captured if key[0].times)
    assert graphs.rounds.fitted(plan).budget == 8
