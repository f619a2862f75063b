"""The next-token kernels: the specification's tokens, every filter, every edge, every order."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import simt
from ddtree_numba.kernels.next_token import (
    PRODUCT,
    Shape,
    next_token,
    next_token_merge,
    next_token_shard,
    workspace_words,
)
from ddtree_numba.kernels.row_settings import settings
from ddtree_numba.spec import next_token as spec
from ddtree_numba.spec.next_token import SamplingParams
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

SMALL = {
    name: case | dict(rows=min(case["rows"], 2 if case["vocabulary"] > 500 else 5))
    for name, case in spec.CASES.items()
    if not name.startswith("k26")
}
SMALL_BLOCKS = Shape(threads=32, bits=5)  # less for the executor to do, and more blocks
GREEDY, PLAIN = SamplingParams(), SamplingParams(temperature=1.0)


def on_kernel(logits, positions, seeds, params, shape=SMALL_BLOCKS):
    rows = len(logits)
    workspace = np.zeros(workspace_words(rows, True, shape), np.int64)
    out = np.empty(rows, np.int32)
    given = settings(params, rows)
    made = next_token(logits, positions, seeds, given, workspace=workspace, out=out, shape=shape)
    assert made is out
    assert not workspace.any(), "left as it was"
    return out


def draw(rows, params, seed=0, shape=SMALL_BLOCKS):
    rows = np.asarray(rows, F32)
    given = rows, np.arange(len(rows)), np.full(len(rows), seed, np.uint64), params
    tokens = on_kernel(*given, shape)
    assert np.array_equal(tokens, spec.next_token(*given))
    return tokens


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_equals_the_specification(name, dtype, rng):
    given = spec.inputs(SMALL[name], rng)
    given["logits"] = given["logits"].astype(dtype)
    assert np.array_equal(on_kernel(**given), spec.next_token(**given))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_k=1)])
def test_s07_ties_go_to_the_lowest_id(params):
    assert draw([[1, 3, 3, 0]], params).tolist() == [1]
    assert draw([[-1, -0.0, 0.0, -1]], params).tolist() == [1]
    for seed in range(4):  # whichever of three blocks comes first
        with simt.shuffled(seed):
            across = np.zeros((1, 600))
            assert draw(across, params).tolist() == [0]
            across[0, [255, 256, 512]] = 1
            assert draw(across, params).tolist() == [255]


@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(0.7, 3, 0.9, 0.1)])
def test_s12_a_row_without_a_distribution_gives_no_token(params):
    rows = np.random.default_rng(1).standard_normal((6, 10)).astype(F32)
    rows[0] = np.nan
    rows[1, 9] = np.nan
    rows[1, 9] = np.copysign(np.nan, -1)
    rows[2] = -np.inf
    rows[3, 4] = np.inf
    assert draw(rows, params)[:4].tolist() == [-1, -1, -1, -1]
    assert draw(np.empty((0, 10)), params).shape == (0,)


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1e30, 1e300])
def test_an_excluded_token_never_wins(temperature):
    rows = np.full((8, 9), -np.inf)
    rows[:, [2, 5]] = -80.0, 60.0
    rows[4:, [2, 5]] = -3e38, -3.2e38  # overflows at low temperature, and must not vanish
    for params in (SamplingParams(temperature), SamplingParams(temperature, 5, 0.99, 1e-9)):
        assert set(draw(rows, params).tolist()) <= {2, 5}


FILTERS = [
    dict(top_k=1),
    dict(top_k=7),
    dict(top_p=0.5),
    dict(top_p=1e-12),
    dict(top_p=1 - 2**-53),
    dict(min_p=0.2),
    dict(min_p=1.0),
    dict(top_k=40, top_p=0.9),
    dict(top_k=40, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_on_flat_and_steep_rows(filters, rng):
    """Flat: ties decide, by id. Steep: far beyond the two octaves of the first launch."""
    rows = rng.standard_normal((4, 100)).astype(F32)
    rows *= F32.type([0.0, 0.01, 3.0, 200.0])[:, None]
    rows[2] = rows[2].round(1)
    for temperature in (0.5, 30.0):
        draw(rows, SamplingParams(temperature, **filters))


def test_the_threshold_may_lie_in_any_block(rng):
    rows = rng.standard_normal((1, 1001)).astype(F32)
    for top_k in (1, 100, 500, 1000):
        draw(rows, SamplingParams(1.0, top_k=top_k))
    draw(np.sort(rows), SamplingParams(1.0, top_k=256, top_p=0.3))


def test_the_product_s_blocks_draw_the_same(rng):
    """2,048 tokens a block, 2,048 bins a launch."""
    rows = rng.standard_normal((1, 2500)).astype(F32)
    draw(rows, SamplingParams(0.8, top_k=2100, top_p=0.9), shape=PRODUCT)
    draw(rows, GREEDY, shape=PRODUCT)


def test_s19_top_k_of_zero_or_of_the_whole_vocabulary_is_off(rng):
    rows = rng.standard_normal((4, 16))
    plain = draw(rows, PLAIN)
    for k in (0, 16, 17, 2**40):
        assert np.array_equal(draw(rows, SamplingParams(1.0, top_k=k)), plain)


def test_every_row_has_its_own_parameters(rng):
    """Greedy, plain and filtered requests in one batch; each as alone."""
    params = [GREEDY, PLAIN, *(SamplingParams(0.8, **f) for f in FILTERS[:6])]
    logits = rng.standard_normal((8, 100)).astype(F32) * 3
    positions, seeds = rng.integers(0, 2**40, 8), rng.integers(0, 2**64, 8, np.uint64)
    together = on_kernel(logits, positions, seeds, params)
    for i in range(8):
        row = slice(i, i + 1)
        alone = spec.next_token(logits[row], positions[row], seeds[row], params[i])
        assert together[i] == alone[0]


@pytest.mark.parametrize("params", [GREEDY, PLAIN])
@pytest.mark.parametrize("shards", [2, 8])
def test_shards_draw_what_whole_rows_draw(params, shards, rng):
    """Ties across shards go to the lower id; one NaN in one shard spoils its row alone."""
    logits = (rng.standard_normal((5, 160)) * 3).astype(F32).round(1)
    logits[0], logits[1, 150], logits[2, :80] = 0, np.nan, -np.inf
    positions, seeds = np.arange(5) + 2**33, rng.integers(0, 2**64, 5, np.uint64)
    keys, width = np.empty((shards, 5), np.int64), 160 // shards
    workspace = np.zeros(workspace_words(5, False), np.int64)
    for s in range(shards):
        part = np.ascontiguousarray(logits[:, s * width : (s + 1) * width])
        next_token_shard(
            *(part, positions, seeds, settings(params, 5), s * width),
            workspace=workspace,
            out=keys[s],
            shape=SMALL_BLOCKS,
        )
    out = next_token_merge(keys, out=np.empty(5, np.int32))
    assert np.array_equal(out, spec.next_token(logits, positions, seeds, params))
    assert out[1] == -1


@pytest.mark.parametrize("name", ["partial_block", "all_filters"])
def test_a_row_does_not_depend_on_its_company(name, rng):
    given = spec.inputs(spec.CASES[name] | dict(rows=4, vocabulary=300), rng)
    together = on_kernel(**given)
    for order in ([3, 0], [2], [1, 3, 2, 0]):
        part = {n: v[order] for n, v in given.items() if n != "params"}
        assert np.array_equal(on_kernel(**part, params=given["params"]), together[order])


def test_one_workspace_serves_calls_of_any_number_of_rows(rng):
    """Where one call has its rows' state, another one has bins."""
    params, workspace = SamplingParams(1.0, top_k=20), np.zeros(2_000, np.int64)
    for rows in (8, 1, 5, 1):
        given = many_rows(rows, 64, rng)
        on = given | dict(params=settings(params, rows), workspace=workspace, shape=SMALL_BLOCKS)
        tokens = next_token(**on, out=np.empty(rows, np.int32))
        assert np.array_equal(tokens, spec.next_token(**given, params=params))
        assert not workspace.any()


def test_draws_are_pinned():
    logits = (np.arange(50) * 37 % 50 / 10).astype(F32)
    rows, seeds = np.tile(logits, (8, 1)), np.full(8, 2**40 + 3, np.uint64)
    tokens = on_kernel(rows, np.arange(8) + 2**33, seeds, PLAIN)
    assert tokens.tolist() == [4, 31, 9, 31, 8, 5, 24, 47]


def test_shapes_and_values_that_do_not_fit_are_named():
    good = dict(
        logits=np.zeros((2, 4), F32),
        positions=np.zeros(2, np.int64),
        seeds=np.zeros(2, np.uint64),
        params=settings(PLAIN, 2),
        workspace=np.zeros(workspace_words(2, False), np.int64),
        out=np.empty(2, np.int32),
    )
    next_token(**good)
    for change, message in (
        (dict(positions=np.zeros(2, np.int32)), "positions: dtype int32, expected int64"),
        (dict(seeds=np.zeros(3, np.uint64)), r"seeds: shape \(3,\), expected \(2,\)"),
        (dict(out=np.empty(2, np.int64)), "out: dtype int64, expected int32"),
        (dict(logits=np.zeros((2, 8), F32)[:, ::2]), "logits: not contiguous"),
        (dict(logits=np.zeros((2, 0), F32)), "logits: 0 tokens"),
        (dict(workspace=np.zeros(15, np.int64)), r"workspace: shape \(15,\), expected \(16,\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            next_token(**good | change)
    keys = dict(first_id=4, out=np.empty(2, np.int64))
    next_token_shard(**good | keys)
    with pytest.raises(ValueError, match="^first_id: 2, expected a multiple of 4"):
        next_token_shard(**good | keys | dict(first_id=2))
    with pytest.raises(ValueError, match="^params: top_k"):
        next_token_shard(**good | keys | dict(params=settings(SamplingParams(1.0, 3), 2)))
    with pytest.raises(ValueError, match="^params must have 2 entries, not 1"):
        settings([PLAIN], 2)


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


def many_rows(rows, vocabulary, rng):
    return dict(
        logits=(rng.standard_normal((rows, vocabulary)) * 2).astype(F32),
        positions=rng.integers(0, 2**40, rows),
        seeds=rng.integers(0, 2**64, rows, np.uint64),
    )


@pytest.mark.parametrize("rows", [500, pytest.param(10_000, marks=SLOW)])
def test_many_rows_draw_the_specification_s_tokens(rows, rng):
    given = many_rows(rows, 16, rng) | dict(params=PLAIN)
    assert np.array_equal(on_kernel(**given), spec.next_token(**given))


def on_gpu(logits, positions, seeds, params):
    import cupy

    rows = len(logits)
    given = to_gpu(dict(logits=logits, positions=positions, seeds=seeds))
    workspace = cupy.zeros(workspace_words(rows, True), np.int64)
    made = settings(params, rows)
    placed = replace(made, **{n: to_gpu(getattr(made, n)) for n in ARRAYS})
    out = cupy.empty(rows, np.int32)
    next_token(**given, params=placed, workspace=workspace, out=out)
    first = to_host(out)
    next_token(**given, params=placed, workspace=workspace, out=out)
    assert np.array_equal(first, to_host(out)), "the workspace serves again"
    assert not to_host(workspace).any()
    return first


ARRAYS = ("temperature", "top_k", "share", "min_p")
SAMPLED = [PLAIN, *(SamplingParams(0.8, **f) for f in FILTERS)]


@pytest.mark.gpu
@pytest.mark.parametrize("params", [GREEDY, *SAMPLED], ids=str)
def test_gpu_equals_the_specification(params, rng):
    given = spec.inputs(spec.CASES["k26"] | dict(rows=3), rng) | dict(params=params)
    given["logits"][1] = rng.standard_normal(163_840)  # no ties, two octaves hold few of them
    assert np.array_equal(on_gpu(**given), spec.next_token(**given))


@pytest.mark.gpu
def test_gpu_64_requests_of_65_nodes(rng):
    given = many_rows(64 * 65, 4_096, rng) | dict(params=GREEDY)
    given["logits"] = given["logits"].round(1)  # ties
    assert np.array_equal(on_gpu(**given), spec.next_token(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_gpu_10_000_rows_draw_the_specification_s_tokens(params, rng):
    given = many_rows(10_000, 2_048 if params == PLAIN else 200, rng) | dict(params=params)
    assert np.array_equal(on_gpu(**given), spec.next_token(**given))
