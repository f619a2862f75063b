"""The cost rule that chooses a tree's size."""

import time

import numpy as np

from ddtree_numba.budget import StepTimes, best_sizes
from ddtree_numba.model.backend import NumpyBackend


def times(slope: float, draft: float = 1.0, base: float = 10.0) -> StepTimes:
    """Verify steps of base + slope seconds a row."""
    widths = (1, 2, 4, 8, 16, 32, 65)
    return StepTimes(draft, widths, tuple(base + slope * w for w in widths))


def by_definition(scores: np.ndarray, size: int, step: StepTimes) -> int:
    """theta_n = (1 + sum of masses) / (C_d + C_v(n)), up to the first node that lowers it."""

    def theta(n: int) -> float:
        mass = 1 + sum(float(np.exp(np.float64(s))) for s in scores[1 : n + 1])
        return mass / (step.draft + float(step.verify_seconds(np.array([n + 1]))[0]))

    n = 0
    while n + 1 < size and theta(n + 1) > theta(n):
        n += 1
    return n + 1


def best_size(scores, size: int, step: StepTimes) -> int:
    return int(best_sizes(scores[None], np.array([size], np.int32), step, NumpyBackend())[0])


def test_the_rule_by_its_definition():
    rng = np.random.default_rng(5)
    for _ in range(200):
        masses = np.sort(rng.uniform(0, 1, 64).astype(np.float32) ** 4)[::-1]
        scores = np.concatenate([[0], np.log(masses)]).astype(np.float32)
        size = int(rng.integers(1, 66))
        step = times(float(rng.uniform(0, 5)), base=float(rng.uniform(1, 50)))
        assert best_size(scores, size, step) == by_definition(scores, size, step)


def test_free_rows_take_the_whole_tree_and_dear_rows_only_the_root():
    scores = np.concatenate([[0], np.linspace(-0.1, -6, 40)]).astype(np.float32)
    assert best_size(scores, 41, times(slope=0.0)) == 41
    assert best_size(scores, 41, times(slope=1000.0)) == 1


def test_an_impossible_node_is_never_added():
    scores = np.array([0, -0.5, -np.inf, -np.inf], np.float32)
    assert best_size(scores, 4, times(slope=0.0)) == 2


def test_times_between_and_beyond_the_measured_widths():
    step = StepTimes(0.0, (1, 3, 5), (1.0, 2.0, 4.0))
    assert step.verify_seconds(np.array([1, 2, 3, 4, 5, 6, 9])).tolist() == [1, 1.5, 2, 3, 4, 5, 8]


def test_measured_times_never_fall_with_the_width():
    spans = iter([3.0, 2.0, 4.0, 4.0, 1.0, 9.0, 8.0, 0.5])
    step = StepTimes.measure(lambda: None, lambda rows: None, lambda call: next(spans))
    assert step.draft == 0.5 and step.verify == (3.0, 3.0, 4.0, 4.0, 4.0, 9.0, 9.0)


def test_times_are_measured():
    def seconds(call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    step = StepTimes.measure(lambda: None, lambda rows: sum(range(20_000 // rows)), seconds)
    assert step.draft >= 0 and list(step.verify) == sorted(step.verify)
