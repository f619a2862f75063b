"""What a round emits and where it leaves each request, by hand and against a plain loop."""

import numpy as np
import pytest

from ddtree_numba.spec.round_advance import CASES, inputs, round_advance
from tests.cases import small

STATE = ("roots", "starts", "room")


def given_of(**changes):
    """One request that accepted nodes 0, 2, 3 of a tree of four; room for five more tokens."""
    given = dict(
        roots=[7],
        starts=[100],
        room=[5],
        tree_tokens=[[7, 20, 21, 22]],
        nodes=[[0, 2, 3, -1]],
        counts=[3],
        next_tokens=[40],
    )
    return {name: np.array(value, np.int32) for name, value in (given | changes).items()}


def state(given):
    return [given[name].tolist() for name in STATE]


def test_accepted_tokens_then_the_next_one():
    given = given_of()
    assert round_advance(**given).tolist() == [[21, 22, 40, -1]]
    assert state(given) == [[40], [103], [2]]


def test_the_root_alone_emits_the_next_token():
    given = given_of(counts=[1])
    assert round_advance(**given).tolist() == [[40, -1, -1, -1]]
    assert state(given) == [[40], [101], [4]]


def test_a_path_may_fill_the_report():
    given = given_of(nodes=[[0, 1, 2, 3]], counts=[4])
    assert round_advance(**given).tolist() == [[20, 21, 22, 40]]
    assert state(given) == [[40], [104], [1]]


def test_an_inactive_request_stays_untouched():
    given = given_of(counts=[0])
    assert round_advance(**given).tolist() == [[-1] * 4]
    assert state(given) == [[7], [100], [5]]


def test_s12_without_a_next_token_the_root_stays():
    given = given_of(next_tokens=[-1])
    assert round_advance(**given).tolist() == [[21, 22, -1, -1]]
    assert state(given) == [[7], [103], [2]]


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_a_plain_loop(name, rng):
    given = inputs(CASES[name], rng)
    before = {n: given[n].tolist() for n in STATE}
    tokens = round_advance(**given).tolist()
    for r, count in enumerate(given["counts"].tolist()):
        emitted = [int(given["tree_tokens"][r, node]) for node in given["nodes"][r, 1:count]]
        following = int(given["next_tokens"][r])
        emitted += [following] * (count > 0)
        assert tokens[r] == emitted + [-1] * (len(tokens[r]) - len(emitted))
        moved = count and following >= 0
        assert given["roots"][r] == (following if moved else before["roots"][r])
        assert given["starts"][r] == before["starts"][r] + count
        assert given["room"][r] == before["room"][r] - count


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(counts=[5]), "counts must lie between 0 and 4"),
        (dict(counts=[-1]), "counts must lie between 0 and 4"),
        (dict(nodes=[[0, 4, 3, -1]]), "nodes must lie below 4"),
        (dict(nodes=[[0, -1, 3, -1]]), "nodes must lie below 4"),
        (dict(room=[5, 5]), r"room must have 1 entries, not shape \(2,\)"),
        (dict(tree_tokens=[7, 20]), r"tree_tokens must have 1 rows, not shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_moves(changes, message):
    given = given_of(**changes)
    before = state(given)
    with pytest.raises(ValueError, match=message):
        round_advance(**given)
    assert state(given) == before
