"""Top-k of draft logits: order, ties, NaN, exact sums, independent rows."""

import math

import numpy as np
import pytest

from ddtree_numba.spec.draft_topk import CASES, draft_topk, inputs
from ddtree_numba.spec.numerics import BF16, F32
from tests.cases import small


def by_sorting(row, k):
    """(ids, log-probs in float64) the slow way."""
    finite = [float(x) for x in row if not math.isnan(x)]
    log_sum = math.log(sum(math.exp(x - max(finite)) for x in finite)) + max(finite)
    key = [(1, 0.0, i) if math.isnan(x) else (0, -float(x), i) for i, x in enumerate(row)]
    ids = [i for *_, i in sorted(key)][:k]
    return ids, [float(row[i]) - log_sum for i in ids]


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_a_full_sort(name):
    arguments = inputs(CASES[name], np.random.default_rng(0))
    logits, k = arguments["logits"], min(arguments["k"], CASES[name]["vocabulary"])
    token_ids, log_probs = draft_topk(**arguments)
    assert token_ids.shape == log_probs.shape == (*logits.shape[:2], k)
    assert token_ids.dtype == np.int32 and log_probs.dtype == F32
    for r, depth in np.ndindex(logits.shape[:2]):
        ids, expected = by_sorting(logits[r, depth], k)
        assert token_ids[r, depth].tolist() == ids
        assert np.allclose(log_probs[r, depth], expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_s07_equal_logits_come_out_by_ascending_id():
    token_ids, _ = draft_topk(np.float32([[[1, 3, 3, 0]]]), 3)
    assert token_ids.tolist() == [[[1, 2, 0]]]
    token_ids, log_probs = draft_topk(np.zeros((1, 1, 300), F32), 300)
    assert token_ids[0, 0].tolist() == list(range(300))
    assert np.all(log_probs == log_probs[0, 0, 0])
    tied = np.zeros((1, 1, 163840), F32)
    tied[0, 0, ::1000] = 1
    assert draft_topk(tied, 5)[0].tolist() == [[[0, 1000, 2000, 3000, 4000]]]


def test_bfloat16_logits_tie_and_are_widened_first():
    logits = (np.random.default_rng(1).standard_normal((1, 7, 5000)) * 4).astype(BF16)
    token_ids, log_probs = draft_topk(logits, 64)
    assert len(np.unique(log_probs[0, 0])) < 64, "the case has no ties"
    again = draft_topk(logits.astype(F32), 64)
    assert np.array_equal(token_ids, again[0]) and np.array_equal(log_probs, again[1])


def test_s12_nan_sorts_last_and_has_no_mass():
    token_ids, log_probs = draft_topk(np.float32([[[np.nan, 1, -np.inf, 1]]]), 4)
    assert token_ids.tolist() == [[[1, 3, 2, 0]]]
    assert np.allclose(log_probs[0, 0, :2], -math.log(2))
    assert log_probs[0, 0, 2] == -np.inf and np.isnan(log_probs[0, 0, 3])


@pytest.mark.parametrize("bad", [[np.nan] * 4, [-np.inf] * 4, [1, np.inf, 2, 3]])
def test_s12_a_row_without_a_finite_maximum_proposes_nothing(bad):
    good = [1, 2, 3, 4]
    token_ids, log_probs = draft_topk(np.float32([[bad, good]]), 2)
    assert np.all(np.isnan(log_probs[0, 0])) and np.all(token_ids >= 0) and np.all(token_ids < 4)
    assert np.array_equal(log_probs[0, 1], draft_topk(np.float32([[good]]), 2)[1][0, 0])


@pytest.mark.parametrize("k", [0, 1, 16, 17, 9999999])
def test_s19_k_above_the_vocabulary_gives_all_of_it(k):
    logits = np.random.default_rng(2).standard_normal((1, 2, 16)).astype(F32)
    token_ids, _ = draft_topk(logits, k)
    assert token_ids.shape == (1, 2, min(k, 16))


def test_s19_negative_k_is_refused():
    with pytest.raises(ValueError, match="^k must"):
        draft_topk(np.zeros((1, 1, 16), F32), -1)
    with pytest.raises(ValueError, match="^logits must"):
        draft_topk(np.zeros((1, 16), F32), 1)


def test_extreme_logits_keep_log_probs_at_most_zero():
    _, log_probs = draft_topk(np.float32([[[3e38, -3e38, 0], [100, -100, -104]]]), 3)
    assert np.all(log_probs <= 0) and log_probs[0, 0].tolist() == [0, -np.float32(3e38), -np.inf]


def test_the_order_of_the_vocabulary_does_not_change_a_log_prob():
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((1, 1, 20000)) * 4).astype(F32)
    shuffled = rng.permuted(logits, axis=2)
    assert np.array_equal(draft_topk(logits, 20000)[1], draft_topk(shuffled, 20000)[1])


def test_a_row_does_not_depend_on_its_company():
    logits = (np.random.default_rng(4).standard_normal((5, 3, 1001)) * 4).astype(F32)
    together = draft_topk(logits, 9)
    logits[[0, 2, 4]] = logits[[4, 0, 2]]
    for part in draft_topk(logits[1:2], 9), draft_topk(logits[:, :], 9):
        row = min(1, len(part[0]) - 1)
        for alone, among in zip(part, together, strict=True):
            assert np.array_equal(alone[row], among[1])
    single = draft_topk(logits[3:4, 2:3], 9)
    assert np.array_equal(single[1][0, 0], together[1][3, 2])
