"""The kernel of the head-wise products on the CPU executor and, marked gpu, at published sizes."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.absorb import FEW, absorb
from ddtree_numba.spec import absorb as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CASES = {name: case for name, case in spec.CASES.items() if not name.startswith("k26")}
CASES |= dict(
    queries=dict(T=9, h=2, a=128, b=128),
    parts_of_a_slice=dict(T=3, h=2, a=72, b=40),
    a_few_outputs=dict(T=8, h=1, a=8, b=8),
)
FITTING = [name for name, case in CASES.items() if case["a"] % 8 == 0]


def run(x, weight):
    return absorb(x, weight, out=np.empty((*x.shape[:2], weight.shape[2]), BF16))


@pytest.mark.parametrize("name", FITTING)
def test_agrees_with_the_specification(name, rng):
    given = spec.inputs(CASES[name], rng)
    expected = spec.absorb(**given)
    out = np.empty_like(expected)
    assert absorb(**given, out=out) is out
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **spec.TOLERANCE)


def test_rounds_once_at_the_end():
    """256 + 1 + 1 is 258, within a slice and across slices; a sum kept in bfloat16 stays at 256."""
    x, weight = np.zeros((1, 1, 128), BF16), np.ones((1, 128, 8), BF16)
    for ones in ((1, 2), (64, 127)):
        x[...] = 0
        x[0, 0, [0, *ones]] = 256, 1, 1
        assert (run(x, weight) == 258).all()


@pytest.mark.parametrize(("ins", "outs"), [(32, 64), (128, 8)])
def test_s09_a_row_and_a_head_have_the_same_bits_alone(ins, outs, rng):
    x = rng.standard_normal((11, 2, ins)).astype(BF16)
    weight = rng.standard_normal((2, ins, outs)).astype(BF16)
    together = run(x, weight)
    for i in (0, 7, 10):
        assert run(x[i : i + 1], weight).tobytes() == together[i].tobytes()
    for count in (2, 9):
        assert run(x[1 : 1 + count], weight).tobytes() == together[1 : 1 + count].tobytes()
    order = rng.permutation(11)
    assert run(x[order], weight).tobytes() == together[order].tobytes()
    heads = run(np.ascontiguousarray(x[:, 1:2]), weight[1:2])
    assert heads.tobytes() == together[:, 1:2].tobytes()


def test_a_block_takes_fewer_or_more_tokens_with_the_same_bits(rng):
    """Beyond 8 blocks of a few tokens, blocks take more each."""
    x = rng.standard_normal((8 * FEW + 1, 1, 8)).astype(BF16)
    weight = rng.standard_normal((1, 8, 8)).astype(BF16)
    assert run(x, weight)[: 8 * FEW].tobytes() == run(x[: 8 * FEW], weight).tobytes()


def test_rows_may_lie_apart(rng):
    """Queries are the head of a wider row and go to the head of another; gaps stay untouched."""
    wide = np.full((5, 2, 48), np.nan, BF16)
    wide[..., :32] = rng.standard_normal((5, 2, 32)).astype(BF16)
    weight = rng.standard_normal((2, 32, 64)).astype(BF16)
    out = np.full((5, 2, 80), 7, BF16)
    absorb(wide[..., :32], weight, out=out[..., :64])
    assert (out[..., 64:] == 7).all()
    assert out[..., :64].tobytes() == run(wide[..., :32].copy(), weight).tobytes()


def test_m01_a_nan_row_stays_by_itself(rng):
    given = spec.inputs(CASES["tiny_queries"] | dict(T=3), rng)
    clean = run(**given)
    given["x"][1, 2] = np.nan
    out = run(**given)
    assert np.isnan(out[1, 2].astype(F32)).all()
    out[1, 2] = clean[1, 2]
    assert out.tobytes() == clean.tobytes()


def test_what_does_not_fit_is_named():
    x, weight, out = (
        np.zeros((1, 2, 8), BF16),
        np.zeros((2, 8, 16), BF16),
        np.zeros((1, 2, 16), BF16),
    )
    with pytest.raises(ValueError, match=r"weight \(2, 8, 16\) does not fit x \(1, 2, 4\)"):
        absorb(x[..., :4], weight, out=out)
    with pytest.raises(ValueError, match=r"does not fit x \(1, 2, 8\) and out \(1, 2, 8\)"):
        absorb(x, weight, out=out[..., :8])
    with pytest.raises(ValueError, match=r"weight \(1, 7, 5\): expected multiples of 8"):
        absorb(np.zeros((1, 1, 7), BF16), np.zeros((1, 7, 5), BF16), out=np.zeros((1, 1, 5), BF16))
    with pytest.raises(ValueError, match="weight: dtype float32, expected bfloat16"):
        absorb(x, weight.astype(F32), out=out)
    with pytest.raises(ValueError, match="x: dtype float32, expected bfloat16"):
        absorb(x.astype(F32), weight, out=out)
    apart = np.zeros((1, 2, 12), BF16)
    with pytest.raises(ValueError, match="x: strides .* expected rows at multiples of 16 bytes"):
        absorb(apart[..., :8], weight, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k26", "k26_outputs"])
def test_gpu_agrees_with_float64_and_a_row_with_itself_alone(name, rng):
    """One rounding to bfloat16 and a fraction of a float32 step of each product."""
    rows = 8 * FEW + 65
    given = spec.inputs(spec.CASES[name] | dict(T=rows), rng)
    given["x"][1] *= BF16.type(1e20)
    given["x"][2] *= BF16.type(1e-20)
    x, weight = given["x"].astype(np.float64), given["weight"].astype(np.float64)
    exact, size = (
        np.einsum("tha,hab->thb", *each) for each in ((x, weight), (abs(x), abs(weight)))
    )
    device = to_gpu(given)
    out = to_gpu(np.empty(exact.shape, BF16))
    together = to_host(absorb(**device, out=out))
    error = abs(together.astype(np.float64) - exact)
    assert (error <= 2**-8 * abs(exact) + 2**-20 * size).all()
    order = rng.permutation(rows)
    for picked in (order[:1], order[:2], order[:9], order[:17], order[:65], order[:129], order):
        x = to_gpu(given["x"][picked])
        out = to_gpu(np.empty((len(picked), *exact.shape[1:]), BF16))
        alone = to_host(absorb(x, device["weight"], out=out))
        assert alone.tobytes() == together[picked].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_queries", "tiny_outputs", "parts_of_a_slice", "queries"])
def test_gpu_small_agrees_with_the_specification(name, rng):
    """Small enough for racecheck and memcheck."""
    given = spec.inputs(CASES[name], rng)
    expected = spec.absorb(**given)
    out = to_host(absorb(**to_gpu(given), out=to_gpu(np.empty_like(expected))))
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **spec.TOLERANCE)
