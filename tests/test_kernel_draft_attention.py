"""The drafter's attention on the CPU executor and the GPU: values, borders, the law to the bit."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import draft_attention as module
from ddtree_numba.kernels.draft_attention import draft_attention, workspace_words
from ddtree_numba.spec import draft_attention as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host
from tests.test_draft_attention import dense

SMALL = dict(B=8, hq=2, hkv=1, d=32)
K26 = spec.CASES["k26"]
ROWS = ("q", "k", "v", "page_table", "lengths")  # of a request


def run(given, gpu=False):
    """The kernel's result; the workspace holds NaN before."""
    shape, kv_heads = given["q"].shape, given["k"].shape[2]
    words = workspace_words(shape, kv_heads, given["page_table"].shape[1])
    workspace, out = np.full(words, np.nan, F32), np.empty(shape, BF16)
    if not gpu:
        assert draft_attention(**given, workspace=workspace, out=out) is out
        return out
    return to_host(draft_attention(**to_gpu(given), workspace=to_gpu(workspace), out=to_gpu(out)))


def check(given, gpu=False):
    out = run(given, gpu)
    expected = spec.draft_attention(**given).astype(F32)
    np.testing.assert_allclose(out.astype(F32), expected, **spec.TOLERANCE)
    return out


def part(given, requests):
    return given | {name: given[name][requests] for name in ROWS}


def assert_alone(given, out, gpu=False):
    """Every request alone, and all of them in another order, have the same bits."""
    for r in range(len(out)):
        assert run(part(given, slice(r, r + 1)), gpu)[0].tobytes() == out[r].tobytes(), r
    if gpu:
        order = np.arange(len(out))[::-1]
        assert run(part(given, order), gpu)[order].tobytes() == out.tobytes()


@pytest.mark.parametrize(
    "case",
    [
        spec.CASES["tiny_rank"],
        dict(lengths=[0], B=8, hq=4, hkv=2, d=32),
        dict(lengths=[65], B=16, hq=2, hkv=1, d=32),
        dict(lengths=[67], B=5, hq=3, hkv=1, d=32),
        dict(lengths=[65], B=8, hq=3, hkv=1, d=64),
        pytest.param(dict(lengths=[66], B=8, hq=8, hkv=1, d=128), marks=pytest.mark.slow),
    ],
    ids=lambda c: f"B{c['B']}-{c['hq']}-{c['hkv']}-d{c['d']}",
)
def test_agrees_with_the_specification(case, rng):
    check(spec.inputs(case, rng))


@pytest.mark.parametrize("length", [1, 57, 63, 64])
def test_s29_page_borders(length, rng):
    """Unowned pages and the free rows of the last one are NaN: one row too many would show."""
    check(spec.inputs(SMALL | dict(lengths=[length]), rng))


@pytest.mark.parametrize("causal, window", [(True, None), (False, 1), (False, 8), (True, 75)])
def test_windows_of_every_kind(causal, window, rng):
    case = SMALL | dict(lengths=[80], causal=causal, window=window)
    check(spec.inputs(case, rng))


def test_positions_left_behind_by_the_window_are_not_read(rng):
    given = spec.inputs(SMALL | dict(lengths=[200], window=100), rng)
    out = run(given)
    gone = np.arange(200 - 100 + 1)  # the first row sees from 101 on
    given["pages"][given["page_table"][0, gone // 64], gone % 64] = np.nan
    given["page_table"][0, :1] = -1
    assert run(given).tobytes() == out.tobytes()


def test_a_long_context_has_splits_of_two_pages(rng):
    check(spec.inputs(SMALL | dict(lengths=[64 * 33 + 1]), rng))


def test_a_split_of_more_pages_than_the_ring_has(monkeypatch, rng):
    monkeypatch.setattr(module, "SPLITS", 2)
    check(spec.inputs(SMALL | dict(lengths=[330]), rng))


def test_m01_a_request_depends_on_no_other_not_even_on_nan(rng):
    given = spec.inputs(SMALL | dict(lengths=[66, 0]), rng)
    out = run(given)
    assert_alone(given, out)
    given["q"][0], given["v"][0] = np.nan, np.nan
    spoilt = run(given)
    assert np.isnan(spoilt[0].astype(F32)).all()
    assert spoilt[1].tobytes() == out[1].tobytes()


def test_a_wider_page_table_changes_no_bits(rng):
    given = spec.inputs(SMALL | dict(lengths=[66]), rng)
    wider = np.pad(given["page_table"], ((0, 0), (0, 3)), constant_values=-1)
    assert run(given | dict(page_table=wider)).tobytes() == run(given).tobytes()


def test_query_rows_do_not_depend_on_each_other(rng):
    given = spec.inputs(SMALL | dict(lengths=[9]), rng)
    out = run(given)
    others = rng.standard_normal(given["q"].shape).astype(BF16)
    others[:, 3] = given["q"][:, 3]
    changed = run(given | dict(q=others))
    assert changed[:, 3].tobytes() == out[:, 3].tobytes()
    assert not np.array_equal(changed[:, 2], out[:, 2])


def test_parts_of_a_joint_projection_need_no_copy(rng):
    """q, k and v side by side in wider rows, as one product gives them."""
    given = spec.inputs(SMALL | dict(lengths=[9, 3]), rng)
    joint = np.concatenate([given[name].reshape(2, 8, -1) for name in "qkv"], -1)
    views = np.split(joint, [64, 96], -1)
    views = {n: x.reshape(given[n].shape, copy=False) for n, x in zip("qkv", views, strict=True)}
    assert run(given | views).tobytes() == run(given).tobytes()


def test_scores_that_grow_with_the_position(rng):
    """The maximum moves with every page; late keys outweigh all before."""
    given = spec.inputs(SMALL | dict(lengths=[200]), rng)
    check(rising(given))


def rising(given):
    """All queries and keys along one direction, keys longer and longer."""
    given["q"][:] = 1
    for r, length in enumerate(given["lengths"]):
        at = np.arange(length)
        slope = (at / 8 - length / 16).astype(F32)[:, None, None]
        given["pages"][given["page_table"][r, at // 64], at % 64, 0] = slope.astype(BF16)
    return given


def test_what_does_not_fit_is_named(rng):
    good = spec.inputs(SMALL | dict(lengths=[3]), rng)
    thin = {name: good[name][..., :16].copy() for name in ("q", "k", "v", "pages")}
    many = dict(q=np.zeros((1, 8, 17, 32), BF16))
    long = dict.fromkeys("qkv", np.zeros((1, 65, 1, 32), BF16))
    for change, message in (
        (dict(v=good["v"][:, :7]), r"v: shape \(1, 7, 1, 32\), expected \(1, 8, 1, 32\)"),
        (dict(pages=good["pages"][:, :32]), r"pages: shape \(3, 32, 2, 1, 32\), expected"),
        (dict(pages=good["pages"][:, ::2].repeat(2, 1)[::2]), "pages: not contiguous"),
        (dict(k=good["k"].astype(F32)), "k: dtype float32, expected bfloat16"),
        (dict(lengths=good["lengths"].astype(np.int64)), "lengths: dtype int64, expected int32"),
        (dict(window=0), "window: 0 positions show nothing"),
        (thin, "q: heads of 16, expected 32, 64, 128"),
        (long, "q: a block of 65 rows, expected at most 64"),
        (many, "q: 8 rows of 17 heads to a key head, expected at most 128 in all"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            run(good | change)
    with pytest.raises(ValueError, match="^workspace: shape"):
        draft_attention(**good, workspace=np.empty(9, F32), out=np.empty_like(good["q"]))


# --- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        K26 | dict(lengths=[4500, 1, 0, 777]),
        K26 | dict(lengths=[1100], hq=64, hkv=8),
        K26 | dict(lengths=[2300, 300], B=16),
        K26 | dict(lengths=[5000, 4096, 100], window=4096, causal=True),
        spec.CASES["k26_window"],
        spec.CASES["tiny"],
        dict(lengths=[500, 1999], B=16, hq=2, hkv=1, d=32),
    ],
    ids=["tp8", "tp1", "block_16", "causal_window", "window", "tiny", "tiny_block_16"],
)
def test_gpu_agrees_with_the_specification_and_the_law(case, rng):
    given = spec.inputs(case, rng)
    out = check(given, gpu=True)
    exact = dense(given)
    assert np.abs(out.astype(np.float64) - exact).max() < 2**-8 * max(1, np.abs(exact).max())
    assert_alone(given, out, gpu=True)


@pytest.mark.gpu
def test_gpu_scores_that_grow_with_the_position(rng):
    check(rising(spec.inputs(K26 | dict(lengths=[5000]), rng)), gpu=True)


@pytest.mark.gpu
def test_gpu_long_context_and_far_pages(rng):
    """131,072 positions: splits of many pages; equal keys, so every weight is the same."""
    given = spec.inputs(K26 | dict(lengths=[131072]), rng)
    given["pages"][:, :, 0], given["k"][:] = 0, 0
    check(given, gpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [SMALL | dict(lengths=[330, 5]), dict(lengths=[70], B=8, hq=8, hkv=1, d=128)]
)
def test_gpu_for_a_sanitizer(case, rng):
    """Small enough for racecheck: rings of several groups of warps, sums that meet."""
    check(spec.inputs(case, rng), gpu=True)
