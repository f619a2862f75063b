"""The token after a row: argmax, filters, noise, and the distribution of 100,000 draws."""

import math

import numpy as np
import pytest

from ddtree_numba.spec.next_token import CASES, SamplingParams, inputs, kept, next_token, scale
from ddtree_numba.spec.noise import exponential, philox, random_words
from ddtree_numba.spec.numerics import BF16, F32
from tests.cases import small

GREEDY, PLAIN = SamplingParams(), SamplingParams(temperature=1.0)


def draw(rows, params, seed=0):
    """One draw a row, at positions 0, 1, ..."""
    rows = np.asarray(rows, F32)
    return next_token(rows, np.arange(len(rows)), np.full(len(rows), seed, np.uint64), params)


def log(p):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(F32)


def kept_ids(p, **filters):
    """Ids that the filters leave of the probabilities p."""
    logits, params = log(p)[None], SamplingParams(temperature=1.0, **filters)
    return np.flatnonzero(kept(logits, scale(logits, 1.0), params)[0]).tolist()


# Greedy


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_k=1)])
def test_s07_ties_go_to_the_lowest_id(params):
    assert draw([[1, 3, 3, 0]], params).tolist() == [1]
    assert draw(np.zeros((1, 300)), params).tolist() == [0]
    assert draw([[-1, -0.0, 0.0, -1]], params).tolist() == [1]
    eight = np.float32([0, 1, 5, 2, 3, 5, 4, 1])
    shards = [draw(eight[None, s : s + 4], params)[0] + s for s in (0, 4)]
    assert draw(eight[None], params).tolist() == [min(shards)] == [2]


def test_a_temperature_below_1e_5_is_greedy_whatever_the_filters():
    rows = np.random.default_rng(0).standard_normal((50, 100))
    greedy = rows.astype(F32).argmax(axis=1)
    for temperature in (0.0, 1e-8, 9e-6):
        params = SamplingParams(temperature, top_k=3, top_p=0.5, min_p=0.5)
        assert np.array_equal(draw(rows, params), greedy)
    assert np.array_equal(draw(rows, SamplingParams(1e-5)), greedy), "the coldest race"


# Rows that hold no distribution


@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(0.7, 3, 0.9, 0.1)])
def test_s12_a_row_without_a_distribution_gives_no_token(params):
    rows = np.random.default_rng(1).standard_normal((6, 10)).astype(F32)
    clean = draw(rows, params)
    rows[0] = np.nan
    rows[1, 9] = np.nan  # in the last, partial tile of 8
    rows[2] = -np.inf
    rows[3, 4] = np.inf
    assert draw(rows, params).tolist() == [-1, -1, -1, -1, *clean[4:]]
    assert draw(np.empty((0, 10)), params).shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.3, 1.0, 1e30, 1e300])
def test_an_excluded_token_never_wins(temperature):
    rows = np.full((2000, 9), -np.inf)
    rows[:, [2, 5]] = -80.0, 60.0
    assert set(draw(rows, SamplingParams(temperature)).tolist()) <= {2, 5}
    rows[:, [2, 5]] = -3e38, -3.2e38  # overflows at low temperature, and must not vanish
    assert set(draw(rows, SamplingParams(temperature)).tolist()) <= {2, 5}
    rows[:, [2, 5]] = 3e38, -3e38
    found = set(draw(rows, SamplingParams(temperature)).tolist())
    assert found == ({2} if temperature <= 1e30 else {2, 5})


def test_extreme_temperatures_keep_to_the_limit():
    counts = np.bincount(draw(np.tile(np.arange(4.0), (4000, 1)), SamplingParams(1e300)))
    assert np.all(np.abs(counts - 1000) < 4 * np.sqrt(750)), "uniform"


# Filters


@pytest.mark.parametrize("k", [0, 16, 17, 9999999])
def test_s19_top_k_of_zero_or_of_the_whole_vocabulary_is_off(k):
    rows = np.random.default_rng(2).standard_normal((200, 16))
    assert np.array_equal(draw(rows, SamplingParams(1.0, top_k=k)), draw(rows, PLAIN))


def test_s19_top_k_cuts_ties_by_id():
    p = np.full(16, 1 / 16)
    for k in (1, 15):
        assert kept_ids(p, top_k=k) == list(range(k))


@pytest.mark.parametrize(
    "values, name",
    [
        (dict(temperature=-1), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(temperature=math.inf), "temperature"),
        (dict(top_k=-1), "top_k"),
        (dict(top_k=1.5), "top_k"),
        (dict(top_p=0), "top_p"),
        (dict(top_p=1.5), "top_p"),
        (dict(top_p=math.nan), "top_p"),
        (dict(min_p=-0.1), "min_p"),
        (dict(min_p=1.1), "min_p"),
        (dict(min_p=math.nan), "min_p"),
        (dict(temperature="warm"), "temperature"),
        (dict(min_p=None), "min_p"),
    ],
)
def test_s19_parameters_out_of_range_are_refused_by_name(values, name):
    with pytest.raises(ValueError, match=f"^{name} must") as error:
        SamplingParams(**values)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"^{name} must"):
        draw([[1, 2]], SamplingParams(**values))


@pytest.mark.parametrize("temperature", [0, 1e-8, 1, 1e300])
@pytest.mark.parametrize("limits", [dict(), dict(top_k=0, top_p=1, min_p=0), dict(min_p=1)])
def test_s19_the_ends_of_the_ranges_are_allowed(temperature, limits):
    SamplingParams(temperature, **limits)


def test_top_p_of_one_and_min_p_of_zero_change_nothing():
    rows = np.random.default_rng(3).standard_normal((300, 40)) * 40  # masses down to zero
    off = SamplingParams(1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert np.array_equal(draw(rows, off), draw(rows, PLAIN))
    logits = rows.astype(F32)
    assert kept(logits, logits, off).all()


def test_filters_leave_the_documented_sets():
    p = [0.4, 0.05, 0.3, 0.05, 0.2]
    assert kept_ids(p, top_k=3) == [0, 2, 4]
    assert kept_ids(p, top_k=4) == [0, 1, 2, 4], "equal: lower id"
    assert kept_ids(p, top_p=0.39) == [0] and kept_ids(p, top_p=0.41) == [0, 2]
    assert kept_ids(p, top_p=0.92) == [0, 1, 2, 4] and kept_ids(p, top_p=0.999) == [0, 1, 2, 3, 4]
    assert kept_ids(p, top_p=1e-9) == [0]
    assert kept_ids(p, min_p=0.4) == [0, 2, 4] and kept_ids(p, min_p=1) == [0]
    assert kept_ids([0.25] * 4, min_p=1) == [0, 1, 2, 3]
    assert kept_ids([0.5, 0, 0.5, 0], top_p=0.99, top_k=3) == [0, 2], "excluded stays excluded"


def test_top_p_counts_what_top_k_has_left():
    p = [0.4, 0.3, 0.2, 0.1]
    assert kept_ids(p, top_p=0.5) == [0, 1]
    assert kept_ids(p, top_p=0.5, top_k=2) == [0], "0.4 is 57 % of 0.7"
    assert kept_ids(p, top_p=0.95, min_p=0.6) == [0, 1]


def test_top_p_is_reached_by_a_sum_that_equals_it_on_paper():
    rng = np.random.default_rng(4)
    for _ in range(200):
        p = np.sort(rng.permutation(np.arange(1, 40))[:8])[::-1]
        n = int(rng.integers(1, 7))
        assert kept_ids(p / p.sum(), top_p=p[:n].sum() / p.sum()) == list(range(n))


# Noise


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The published known answers of Random123."""
    words = philox(*(tuple(np.array([w], np.uint32) for w in part) for part in (counter, key)))
    assert tuple(int(w[0]) for w in words) == expected


def test_words_are_keyed_by_seed_position_and_token_alone():
    seeds = np.array([5, 5, 5 + 2**32, 5 + 2**63, 6], np.uint64)
    positions = np.array([7, 7 + 2**32, 7, 7, 7])
    words = random_words(seeds, positions, 1001)
    flat = words.ravel().tolist()
    assert len(set(flat)) > len(flat) - 10, "each key has a stream of its own"
    for row in range(5):
        alone = random_words(seeds[row : row + 1], positions[row : row + 1], 37)
        assert np.array_equal(alone[0], words[row, :37])
    block = philox(*(tuple(np.array([w], np.uint32) for w in x) for x in ((9, 0, 7, 0), (5, 0))))
    assert words[0, 36:40].tolist() == [int(w[0]) for w in block]


def test_exponential_is_accurate_for_small_and_large_words():
    words = np.concatenate([2 ** np.arange(32), 2 ** np.arange(1, 33) - 1]).astype(np.uint32)
    v = (words.astype(np.float64) + 0.5) / 2**32
    e = exponential(words)
    small = v < 0.5
    assert np.allclose(e[small], -np.log1p(-v[small]), rtol=4e-7, atol=0)
    assert exponential(np.uint32([0]))[0] == 2.0**-33
    assert np.all(np.isfinite(e)) and e.max() == exponential(np.uint32([2**32 - 1]))[0] < 17


def test_exponential_has_the_exponential_distribution():
    words = random_words(np.arange(50, dtype=np.uint64), np.zeros(50, int), 4000).ravel()
    e = np.sort(exponential(words).astype(np.float64))
    expected = 1 - np.exp(-e)
    deviation = np.abs(expected - (np.arange(len(e)) + 0.5) / len(e)).max()
    assert deviation < 1.6 / np.sqrt(len(e)), "Kolmogorov-Smirnov at about 1 %"


def test_draws_are_pinned():
    """Kernels are held to these tokens."""
    logits = (np.arange(50) * 37 % 50 / 10).astype(F32)
    rows, seeds = np.tile(logits, (8, 1)), np.full(8, 2**40 + 3, np.uint64)
    positions = np.arange(8) + 2**33
    assert next_token(rows, positions, seeds, PLAIN).tolist() == [4, 31, 9, 31, 8, 5, 24, 47]


# Rows


@pytest.mark.parametrize("name", small(CASES))
def test_a_row_does_not_depend_on_its_company(name):
    arguments = inputs(CASES[name], np.random.default_rng(5))
    together = next_token(**arguments)
    assert together.dtype == np.int32
    rows = len(together)
    for order in ([0], [rows - 1], list(range(rows))[::-1], [rows - 1, 0, rows // 2]):
        part = {n: v[order] for n, v in arguments.items() if n != "params"}
        assert np.array_equal(next_token(**part, params=arguments["params"]), together[order])


def test_bfloat16_logits_are_widened():
    rows = (np.random.default_rng(6).standard_normal((20, 64)) * 3).astype(BF16)
    assert np.array_equal(draw(rows, PLAIN), draw(rows.astype(F32), PLAIN))


def test_shapes_that_do_not_fit_are_refused_by_name():
    good = dict(logits=np.zeros((2, 3), F32), positions=np.zeros(2, int), seeds=np.zeros(2, int))
    next_token(**good, params=PLAIN)
    for name in good:
        with pytest.raises(ValueError, match=f"^{name} must"):
            next_token(**good | {name: np.zeros(3, F32)}, params=PLAIN)
