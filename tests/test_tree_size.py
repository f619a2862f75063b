"""The cost rule that chooses a tree's size: by its definition, and at its ends."""

import numpy as np
import pytest

from ddtree_numba.spec.tree_size import CASES, inputs, tree_size
from tests.cases import small


def best_size(scores, size: int, seconds) -> int:
    scores = np.array(scores, np.float32)
    return int(tree_size(scores[None], np.array([size]), np.array(seconds, float))[0])


def by_definition(scores: np.ndarray, size: int, seconds: np.ndarray) -> int:
    """theta_n = (1 + sum of probabilities) / seconds, up to the first node that lowers it."""

    def theta(n: int) -> float:
        return (1 + np.exp(scores[1 : n + 1].astype(float)).sum()) / seconds[n]

    n = 0
    while n + 1 < size and theta(n + 1) > theta(n):
        n += 1
    return n + 1


def test_the_rule_by_its_definition(rng):
    for _ in range(200):
        masses = np.sort(rng.uniform(0, 1, 64).astype(np.float32) ** 4)[::-1]
        scores = np.concatenate([[0], np.log(masses)]).astype(np.float32)
        size = int(rng.integers(1, 66))
        seconds = 1 + rng.uniform(1, 50) + rng.uniform(0, 5) * np.arange(1, 66)
        assert best_size(scores, size, seconds) == by_definition(scores, size, seconds)


def test_free_rows_take_the_whole_tree_and_dear_rows_only_the_root():
    scores = np.concatenate([[0], np.linspace(-0.1, -6, 40)])
    assert best_size(scores, 41, np.ones(41)) == 41
    assert best_size(scores, 41, 1 + 1000.0 * np.arange(41)) == 1


def test_an_impossible_node_is_never_added():
    assert best_size([0, -0.5, -np.inf, -np.inf], 4, np.ones(4)) == 2


def test_a_node_that_changes_nothing_is_not_added():
    assert best_size([0, 0, 0], 3, [1, 2, 3]) == 1  # twice the tokens in twice the time


def test_a_request_without_nodes_has_none():
    assert best_size([np.nan, np.nan], 0, np.ones(2)) == 0


@pytest.mark.parametrize("name", small(CASES))
def test_a_request_does_not_depend_on_its_company(name, rng):
    given = inputs(CASES[name], rng)
    sizes = tree_size(**given)
    assert sizes.dtype == np.int32
    for r, size in enumerate(sizes):
        alone = given | dict(scores=given["scores"][r : r + 1], sizes=given["sizes"][r : r + 1])
        assert tree_size(**alone) == [size]


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(sizes=np.array([1, 2])), r"sizes must have 1 entries, not shape \(2,\)"),
        (dict(sizes=np.array([3])), r"sizes must lie between 0 and 2, not \[3\]"),
        (dict(seconds=np.ones(3)), r"seconds must have 2 entries, not shape \(3,\)"),
        (dict(seconds=np.array([1, np.nan])), "seconds must be above 0, not nan"),
        (dict(seconds=np.array([0.0, 1])), "seconds must be above 0, not 0.0"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    good = dict(scores=np.zeros((1, 2), np.float32), sizes=np.array([2]), seconds=np.ones(2))
    with pytest.raises(ValueError, match=f"^{message}$"):
        tree_size(**(good | changed))
