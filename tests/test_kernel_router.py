"""The router kernels: the specification's choice, ties, NaN, and a row's bits in any company."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.router import FEW, instances, router, workspace_words
from ddtree_numba.spec import router as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CASES = {
    name: case | dict(T=case["T"] if "sizes" in case else min(case["T"], 5))
    for name, case in spec.CASES.items()
    if case["H"] % 8 == 0 and name != "k26"
}
CASES["two_runs"] = dict(T=3, H=1096, E=40, k=6)  # the second is short, and no whole unit
NEAR = 1e-5  # scores closer than this may change places


def on_kernel(h, gate, bias, k, scaling, sizes=None, empty=np.empty):
    rows, width = h.shape
    workspace = empty(workspace_words(rows, width, len(gate)), np.int64)
    workspace[...] = -1  # NaN
    out = empty((rows, k), np.int32), empty((rows, k), F32)
    assert router(h, gate, bias, k, scaling, sizes, workspace=workspace, out=out) is out
    return out


def scores64(h, gate, sizes=None, **_):
    if sizes is not None:
        h = h[spec.chooser(len(h), sizes)]
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-(h.astype(np.float64) @ gate.astype(np.float64).T)))


def assert_same_choice(found, given):
    """The specification's experts, but for near-ties, and the weights that belong to them."""
    experts, weights = found
    expected, expected_weights = spec.router(**given)
    scores = scores64(**given)
    biased = scores + given["bias"]
    swapped = experts != expected
    pairs = (np.take_along_axis(biased, e, 1)[swapped] for e in (experts, expected))
    np.testing.assert_allclose(*pairs, rtol=0, atol=NEAR)
    same = ~swapped.any(1)
    np.testing.assert_allclose(weights[same], expected_weights[same], **spec.TOLERANCE)
    return same


def scored(scores, bias, k, scaling=1.0):
    """One token whose sigmoid scores are given, up to bfloat16: a gate read by h = [1, 0, ..]."""
    with np.errstate(divide="ignore"):
        logits = np.log(scores / (1 - np.float64(scores)))
    gate, h = np.zeros((len(scores), 8), BF16), np.zeros((1, 8), BF16)
    gate[:, 0], h[0, 0] = logits, 1
    return on_kernel(h, gate, np.array(bias, F32), k, scaling)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_specification(name, rng):
    given = spec.inputs(CASES[name], rng)
    assert assert_same_choice(on_kernel(**given), given).all()


@pytest.mark.parametrize("count", [1, 2, 31, 33, 128, 129, 384, 385])
def test_e01_any_number_of_experts(count, rng):
    for k in {2, 9, min(count, 32)}:
        given = spec.inputs(dict(T=1, H=16, E=count, k=k), rng)
        if k > count:
            with pytest.raises(ValueError, match=f"cannot pick {k} of {count} experts"):
                on_kernel(**given)
        else:
            assert_same_choice(on_kernel(**given), given)


def test_e02_bias_steers_in_float32_and_never_weighs():
    experts, weights = scored([0.5, 0.5], [7.0002, 7.0], 1)
    assert experts.tolist() == [[0]] and weights.tolist() == [[1.0]]
    assert scored([0.5, 0.5], [7.0, 7.0002], 1)[0].tolist() == [[1]]
    _, weights = scored([0.5, 0.25], [7.0, 7.1], 2, scaling=2.827)
    np.testing.assert_allclose(weights, [[2.827 * 2 / 3, 2.827 / 3]], rtol=5e-3)  # bfloat16 logit


def test_e04_ties_go_to_the_lowest_id():
    experts, weights = scored([0.5] * 384, [0.0] * 384, 8)
    assert experts.tolist() == [list(range(8))] and weights.tolist() == [[0.125] * 8]
    scores = np.full(384, 0.25)
    scores[[300, 20, 7, 383, 150, 99, 40]] = [0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6]
    scores[[381, 380, 12, 11, 333, 200, 201, 202, 203, 55, 56, 57, 58, 310]] = 0.5
    experts, _ = scored(scores, np.zeros(384), 9)
    assert experts.tolist() == [[300, 20, 7, 383, 150, 99, 40, 11, 12]]
    experts, _ = scored([0.5, 0.5, 0.5, 0.5], [-0.5, 0.0, -0.5, -0.0], 4)
    assert experts.tolist() == [[1, 3, 0, 2]]


def test_sizes_that_do_not_fit_are_named(rng):
    given = spec.inputs(CASES["padding"], rng)
    with pytest.raises(ValueError, match="sizes: 2 of 15 rows, which are no multiple"):
        on_kernel(**given | dict(sizes=np.ones(2, np.int32)))
    with pytest.raises(ValueError, match="sizes: dtype int64, expected int32"):
        on_kernel(**given | dict(sizes=np.ones(3, np.int64)))


def test_extreme_logits_stay_finite():
    gate, h = np.zeros((3, 8), BF16), np.ones((1, 8), BF16)
    gate[:2, 0] = -500, 500
    experts, weights = on_kernel(h, gate, np.zeros(3, F32), 3, 1.0)
    assert experts.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(weights, [[2 / 3, 1 / 3, 0]], atol=1e-7)
    _, weights = on_kernel(h, gate[:1], np.zeros(1, F32), 1, 1.0)
    assert weights.tolist() == [[0.0]]  # 0 / (0 + 1e-20), no NaN


def test_an_expert_of_nan_comes_last():
    experts, weights = scored([0.5, np.nan, 0.25, np.nan], np.zeros(4), 4)
    assert experts.tolist() == [[0, 2, 1, 3]] and np.isnan(weights).all()
    experts, weights = scored([0.5, 0.75, 0.25], [0, np.nan, -np.inf], 3)
    assert experts.tolist() == [[0, 2, 1]] and np.isfinite(weights).all()


def test_a_nan_row_picks_the_first_experts_and_stays_by_itself(rng):
    given = spec.inputs(spec.CASES["tiny"] | dict(T=5), rng)
    experts, weights = on_kernel(**given)
    given["h"][3] = np.nan
    poisoned, shares = on_kernel(**given)
    assert np.isnan(shares[3]).all() and poisoned[3].tolist() == [0, 1, 2, 3]
    assert np.array_equal(np.delete(poisoned, 3, 0), np.delete(experts, 3, 0))
    assert np.array_equal(np.delete(shares, 3, 0), np.delete(weights, 3, 0))


@pytest.mark.parametrize("rows", [2, FEW, FEW + 2])
def test_a_row_has_the_same_bits_alone(rows, rng):
    """Two or four tiles of experts a block, rows of one block or shared by two, in any order."""
    given = spec.inputs(dict(T=rows, H=264, E=20, k=3), rng)
    together = on_kernel(**given)
    order = rng.permutation(rows)
    permuted = on_kernel(**given | dict(h=given["h"][order]))
    for one, other in zip(together, permuted, strict=True):
        assert one[order].tobytes() == other.tobytes()
    for i in {0, rows - 1}:
        alone = on_kernel(**given | dict(h=given["h"][i : i + 1]))
        for one, among in zip(alone, together, strict=True):
            assert one.tobytes() == among[i : i + 1].tobytes()


def test_the_gate_does_not_wait_for_the_kernel_ahead():
    for kernel in instances():
        if "_sums_7168" in kernel.name:
            before, _ = kernel.ptx("sm_90").split("griddepcontrol.wait")
            assert before.count("v4.u32") >= 8


def test_shapes_and_values_that_do_not_fit_are_named(rng):
    given = spec.inputs(CASES["tiny"], rng)
    for change, message in (
        (dict(k=13), "cannot pick 13 of 12 experts"),
        (dict(k=0), "cannot pick 0 of 12 experts"),
        (dict(bias=given["bias"].astype(BF16)), "bias: dtype bfloat16, expected float32"),
        (dict(bias=given["bias"][:11]), r"bias: shape \(11,\), expected \(12,\)"),
        (dict(gate=given["gate"][:, :64]), r"gate: shape \(12, 64\), expected \(12, 192\)"),
        (dict(h=given["h"].astype(F32)), "h: dtype float32, expected bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            on_kernel(**given | change)
    odd = spec.inputs(spec.CASES["odd"], rng)
    with pytest.raises(ValueError, match="^h: rows of 33, expected a multiple of 8"):
        on_kernel(**odd)
    many = np.zeros((1025, 8), BF16)
    with pytest.raises(ValueError, match=r"^gate: 1025 experts, expected 1 \.\. 1024"):
        on_kernel(many[:1], many, np.zeros(1025, F32), 1, 1.0)
    good = dict(workspace=np.zeros(8, np.int64), out=(np.zeros((5, 4), np.int32),) * 2)
    with pytest.raises(ValueError, match="^weights: dtype int32, expected float32"):
        router(**given, **good)
    good["out"] = good["out"][0], np.zeros((5, 4), F32)
    with pytest.raises(ValueError, match="^workspace: shape"):
        router(**given, **good)


def on_gpu(given):
    import cupy

    return to_host(on_kernel(**to_gpu(given), empty=cupy.empty))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 9, 17, 65, 129, 1024])
def test_gpu_agrees_with_the_specification_and_with_float64(rows, rng):
    """A logit's error stays below 2**-22 of the sum of its terms' magnitudes."""
    given = spec.inputs(spec.CASES["k26"] | dict(T=rows), rng)
    experts, weights = on_gpu(given)
    same = assert_same_choice((experts, weights), given)
    assert same.mean() > 0.99
    picked = np.take_along_axis(scores64(**given), experts, 1)
    exact = picked / picked.sum(1, keepdims=True) * given["scaling"]
    terms = np.abs(given["h"].astype(F32)) @ np.abs(given["gate"].astype(F32)).T
    bound = terms.max(1, keepdims=True) * 2.0**-22 + 1e-6
    assert (np.abs(weights - exact) <= 2 * bound * exact).all()


@pytest.mark.gpu
def test_gpu_a_row_has_the_same_bits_in_any_company(rng):
    given = spec.inputs(spec.CASES["k26"] | dict(T=129), rng)
    given["h"][5] *= BF16.type(64)
    given["h"][7] = np.nan
    alone = [on_gpu(given | dict(h=given["h"][i : i + 1])) for i in range(20)]
    for rows in (2, 9, 16, 17, 33, 65, 129):
        order = rng.permutation(rows)
        together = on_gpu(given | dict(h=given["h"][:rows][order]))
        for at, i in enumerate(order):
            if i < len(alone):
                for one, among in zip(alone[i], together, strict=True):
                    assert one.tobytes() == among[at : at + 1].tobytes(), (rows, i)


@pytest.mark.gpu
def test_gpu_e04_equal_experts_tie_by_id_whatever_their_tile(rng):
    """Copies of an expert have its bits; large logits saturate, and saturated scores tie."""
    given = spec.inputs(spec.CASES["k26"] | dict(T=34), rng)
    given["gate"][[383, 200, 17, 16, 15]] = given["gate"][100]
    given["bias"][[383, 200, 17, 16, 15, 100]] = 2
    for rows in (1, 34):
        experts, weights = on_gpu(given | dict(h=given["h"][:rows]))
        assert (experts[:, :6] == [15, 16, 17, 100, 200, 383]).all()
        assert (weights[:, :1] == weights[:, 1:6]).all()
    given["h"] *= BF16.type(1000)
    given["bias"][:] = 0
    assert_same_choice(on_gpu(given), given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "past_the_block", "two_runs"])
def test_gpu_small_shapes(name, rng):
    case = spec.CASES.get(name) or CASES[name]
    given = spec.inputs(case, rng)
    assert_same_choice(on_gpu(given), given)
