"""The router against a Python loop: biased choice, unbiased weights, ties, sizes."""

import math

import numpy as np
import pytest

from ddtree_numba.spec.numerics import F32, bf16
from ddtree_numba.spec.router import CASES, inputs, router
from tests.cases import small


def logit(p):
    return math.log(p / (1 - p))


def scored(scores, bias, k, scaling=1.0):
    """One token whose sigmoid scores are given: a gate of logits read by h = [1]."""
    gate = np.array([[logit(s)] for s in scores], F32)
    return router(np.ones((1, 1), F32), gate, np.array(bias, F32), k, scaling)


def loop(h, gate, bias, k, scaling, sizes=None):
    """The same in float64, one token at a time."""
    experts, weights = [], []
    for number, row in enumerate(h.astype(np.float64)):
        if sizes is not None:
            request, node = divmod(number, len(h) // len(sizes))
            row = h[number - node * (node >= sizes[request])].astype(np.float64)
        scores = 1 / (1 + np.exp(-(gate.astype(np.float64) @ row)))
        picks = sorted(range(len(gate)), key=lambda e: (-(scores[e] + bias[e]), e))[:k]
        experts.append(picks)
        weights.append(scores[picks] / (scores[picks].sum() + 1e-20) * scaling)
    return np.array(experts, np.int32).reshape(-1, k), np.array(weights).reshape(-1, k)


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_a_loop_in_float64(name, rng):
    given = inputs(CASES[name], rng)
    experts, weights = router(**given)
    expected, expected_weights = loop(**given)
    assert experts.dtype == np.int32 and weights.dtype == F32
    assert np.array_equal(experts, expected)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


@pytest.mark.parametrize("tokens", [0, 1, 2, 65])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 31, 32, 33, 384, 385])
def test_e01_any_number_of_experts(count, tokens, rng):
    for k in {1, 2, 8, 9}:
        given = inputs(dict(T=tokens, H=16, E=count, k=k), rng)
        if k > count:
            with pytest.raises(ValueError, match=f"cannot pick {k} of {count} experts"):
                router(**given)
            continue
        experts, weights = router(**given)
        assert np.array_equal(experts, loop(**given)[0])
        np.testing.assert_allclose(weights.sum(1), np.full(tokens, 2.827), rtol=1e-6)
    with pytest.raises(ValueError, match="cannot pick 0"):
        router(**{**given, "k": 0})


def test_rows_of_padding_ask_for_no_further_expert(rng):
    given = inputs(CASES["padding"], rng)
    experts, weights = router(**given)
    alone, shares = router(**given | dict(sizes=None))
    for request, size in enumerate(given["sizes"]):
        real, padding = (
            slice(5 * request, 5 * request + size),
            slice(5 * request + size, 5 * request + 5),
        )
        assert np.array_equal(experts[real], alone[real]) and np.array_equal(
            weights[real], shares[real]
        )
        assert (experts[padding] == experts[5 * request]).all()
    for sizes in ([], [1, 2]):
        with pytest.raises(ValueError, match="15 rows are no multiple of"):
            router(**given | dict(sizes=np.array(sizes, np.int32)))


def test_e02_bias_steers_in_float32_and_never_weighs():
    scores, bias = [0.100, 0.108], [7.012, 7.000]
    experts, weights = scored(scores, bias, 1)
    assert experts.tolist() == [[0]] and weights.tolist() == [[1.0]]
    rounded, _ = scored(scores, bf16(np.array(bias)), 1)
    assert rounded.tolist() == [[1]]  # the control: a bfloat16 bias picks the other expert
    experts, weights = scored([0.100, 0.090], bias, 2)
    assert experts.tolist() == [[0, 1]]
    assert weights[0, 0] == pytest.approx(0.100 / 0.190, rel=1e-6)
    _, scaled = scored([0.100, 0.090], bias, 2, scaling=2.827)
    assert scaled[0, 0] == pytest.approx(2.827 * 0.100 / 0.190, rel=1e-6)


def test_e02_a_bias_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="float32"):
        router(np.ones((1, 1), F32), np.ones((2, 1), F32), bf16(np.ones(2)), 1, 1.0)


def test_e04_ties_go_to_the_lowest_id():
    experts, weights = scored([0.5] * 384, [0.0] * 384, 8)
    assert experts.tolist() == [list(range(8))] and weights.tolist() == [[0.125] * 8]
    scores = np.full(384, 0.25)
    scores[[300, 20, 7, 383, 150, 99, 40]] = [0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6]
    tied = [381, 380, 12, 11, 333, 200, 201, 202, 203, 55, 56, 57, 58, 310, 311, 312]
    scores[tied] = 0.5
    for _ in range(10):
        experts, _ = scored(scores, np.zeros(384), 8)
        assert experts.tolist() == [[300, 20, 7, 383, 150, 99, 40, 11]]


def test_e04_a_tie_may_come_from_the_bias():
    experts, _ = scored([0.5, 0.25, 0.5], [0.0, 0.25, 0.0], 2)
    assert experts.tolist() == [[0, 1]]


@pytest.mark.parametrize("count", [12, 33, 384])
def test_a_row_has_the_same_bits_alone(count, rng):
    given = inputs(dict(T=66, H=64, E=count, k=4), rng)
    experts, weights = router(**given)
    for start, rows in [(0, 1), (1, 1), (17, 1), (65, 1), (1, 3), (3, 17), (0, 65)]:
        part = slice(start, start + rows)
        alone = router(**{**given, "h": given["h"][part]})
        assert np.array_equal(alone[0], experts[part])
        assert alone[1].tobytes() == weights[part].tobytes()


def test_extreme_logits_stay_finite():
    gate = np.array([[-500.0], [500.0], [0.0]], F32)
    experts, weights = router(np.ones((1, 1), F32), gate, np.zeros(3, F32), 3, 1.0)
    assert experts.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(weights, [[2 / 3, 1 / 3, 0]], atol=1e-7)
    _, weights = router(np.ones((1, 1), F32), gate[:1], np.zeros(1, F32), 1, 1.0)
    assert weights.tolist() == [[0.0]]  # 0 / (0 + 1e-20), no NaN


def test_an_expert_of_nan_comes_last():
    experts, weights = scored([0.5, np.nan, 0.25, np.nan], np.zeros(4), 3)
    assert experts.tolist() == [[0, 2, 1]] and np.isnan(weights).all()
    assert scored([0.5, np.nan, 0.25], np.zeros(3), 2)[0].tolist() == [[0, 2]]


def test_a_nan_row_picks_the_first_experts_and_stays_by_itself(rng):
    given = inputs(CASES["tiny"], rng)
    experts, weights = router(**given)
    given["h"][3] = np.nan
    poisoned, shares = router(**given)
    assert np.isnan(shares[3]).all() and poisoned[3].tolist() == [0, 1, 2, 3]
    assert np.array_equal(np.delete(poisoned, 3, 0), np.delete(experts, 3, 0))
    assert np.array_equal(np.delete(shares, 3, 0), np.delete(weights, 3, 0))
