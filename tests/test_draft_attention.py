"""The drafter's attention against a dense masked softmax in float64, and its borders."""

import numpy as np
import pytest

from ddtree_numba.spec.draft_attention import CASES, draft_attention, inputs
from ddtree_numba.spec.numerics import BF16, F32
from tests.cases import small

SMALL = dict(B=8, hq=4, hkv=2, d=16)


def as_float32(given):
    return given | {name: given[name].astype(F32) for name in ("q", "k", "v", "pages")}


def dense(given):
    """Context and block as one array of rows, hidden ones masked, one query and head at a time."""
    q, window = given["q"].astype(np.float64), given["window"]
    out = np.zeros(q.shape)
    group = q.shape[2] // given["k"].shape[2]
    for r, length in enumerate(given["lengths"]):
        at = np.arange(length)
        context = given["pages"][given["page_table"][r, at // 64], at % 64]  # [length, 2, hkv, d]
        block = np.stack([given["k"][r], given["v"][r]], axis=1)
        rows = np.nan_to_num(np.concatenate([context, block]).astype(np.float64))
        k_pos = np.arange(len(rows))
        for i in range(q.shape[1]):
            q_pos = length + i
            seen = (k_pos <= q_pos) if given["causal"] else np.ones(len(rows), bool)
            if window is not None:
                seen = seen & (q_pos - k_pos < window)
            for head in range(q.shape[2]):
                keys, values = rows[seen, :, head // group].swapaxes(0, 1)
                scores = given["scale"] * (keys @ q[r, i, head])
                weights = np.exp(scores - scores.max())
                out[r, i, head] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_a_dense_masked_softmax(name, rng):
    given = as_float32(inputs(CASES[name], rng))
    np.testing.assert_allclose(draft_attention(**given), dense(given), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 8, 9, 63, 64, 65, 130, 1000])
def test_windows_of_every_kind(window, causal, rng):
    case = dict(SMALL, lengths=[0, 5, 64, 200], causal=causal, window=window)
    given = as_float32(inputs(case, rng))
    np.testing.assert_allclose(draft_attention(**given), dense(given), rtol=2e-5, atol=2e-6)


def test_a_window_is_more_than_a_tolerance(rng):
    """The control: one position more or less is far outside the comparison's tolerance."""
    given = as_float32(inputs(dict(SMALL, lengths=[200], window=65), rng))
    out = draft_attention(**given)
    for other in (64, 66, None):
        assert np.abs(draft_attention(**given | {"window": other}) - out).max() > 1e-3
    assert np.abs(draft_attention(**given | {"causal": True}) - out).max() > 1e-3


def test_positions_left_behind_by_the_window_are_not_read(rng):
    given = as_float32(inputs(dict(SMALL, lengths=[300], window=100), rng))
    out = draft_attention(**given)
    gone = np.arange(300 - 100 + 1)  # the first row sees from 201 on
    given["pages"][given["page_table"][0, gone // 64], gone % 64] = np.nan
    given["page_table"][0, :3] = -1  # pages that are wholly behind may be given back
    assert draft_attention(**given).tobytes() == out.tobytes()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128])
def test_s29_page_borders(length, rng):
    """Unowned pages and the free rows of the last one are NaN: one row too many would show."""
    given = inputs(dict(SMALL, lengths=[length]), rng)
    assert np.isnan(given["pages"].astype(F32)).any()
    given = as_float32(given)
    np.testing.assert_allclose(draft_attention(**given), dense(given), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", ["page_edges", "split_edges", "causal", "window"])
def test_a_request_has_the_same_bits_alone(name, dtype, rng):
    given = inputs(CASES[name], rng)
    if dtype == F32:
        given = as_float32(given)
    out = draft_attention(**given)
    for r in range(len(out)):
        one = {n: given[n][r : r + 1] for n in ("q", "k", "v", "page_table", "lengths")}
        assert draft_attention(**given | one)[0].tobytes() == out[r].tobytes()


def test_a_query_row_has_the_same_bits_beside_other_queries(rng):
    given = inputs(CASES["tiny"], rng)
    out = draft_attention(**given)
    others = rng.standard_normal(given["q"].shape).astype(BF16)
    others[:, 3] = given["q"][:, 3]
    changed = draft_attention(**given | {"q": others})
    assert changed[:, 3].tobytes() == out[:, 3].tobytes()
    assert not np.array_equal(changed[:, 2], out[:, 2])


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_causal_rows_have_the_same_bits_in_a_shorter_block(cut, rng):
    """What a causal row cannot see may as well not be there."""
    given = inputs(dict(SMALL, lengths=[60], causal=True), rng)
    out = draft_attention(**given)
    short = {n: given[n][:, :cut] for n in ("q", "k", "v")}
    assert draft_attention(**given | short).tobytes() == out[:, :cut].tobytes()


def test_bfloat16_rounds_weights_and_result_only(rng):
    given = inputs(CASES["tiny"], rng)
    out = draft_attention(**given)
    error = np.abs(out.astype(np.float64) - dense(given)).max()
    assert out.dtype == BF16 and 1e-4 < error < 2**-8


def test_query_heads_share_their_group(rng):
    """Heads 0 and 1 read key head 0, heads 2 and 3 key head 1."""
    given = as_float32(inputs(dict(SMALL, lengths=[70]), rng))
    out = draft_attention(**given)
    given["v"][:, :, 1], given["pages"][:, :, 1, 1] = 0, 0
    changed = draft_attention(**given)
    assert np.array_equal(changed[:, :, :2], out[:, :, :2]) and not changed[:, :, 2:].any()


def test_shapes_that_do_not_fit_are_named(rng):
    given = inputs(CASES["no_context"], rng)
    with pytest.raises(ValueError, match="a window of 0 positions"):
        draft_attention(**given | {"window": 0})
    with pytest.raises(ValueError, match=r"v \(1, 7, 2, 16\)"):
        draft_attention(**given | {"v": given["v"][:, :7]})
    with pytest.raises(ValueError, match=r"do not fit q \(1, 8, 3, 16\)"):
        draft_attention(**given | {"q": given["q"][:, :, :3]})
    with pytest.raises(ValueError, match=r"pages \(2, 32, 2, 2, 16\)"):
        draft_attention(**given | {"pages": given["pages"][:, :32]})
