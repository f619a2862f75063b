"""Linear layers against float64, and rows that do not know each other."""

import numpy as np
import pytest

from ddtree_numba.spec.linear import CASES, inputs, linear
from ddtree_numba.spec.numerics import BF16, F32, bf16
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_float64_up_to_one_rounding(name, rng):
    given = inputs(CASES[name], rng)
    out = linear(**given)
    expected = given["x"].astype(np.float64) @ given["weight"].astype(np.float64).T
    step = 2**-8 if out.dtype == BF16 else 0
    assert out.dtype == np.dtype(given["out_dtype"] or BF16)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=step * 1.01, atol=2e-6)


def test_rounds_once_at_the_end():
    """256 + 1 + 1 is 258; a sum kept in bfloat16 would stay at 256."""
    x, weight = bf16(np.ones((1, 3))), bf16(np.array([[256.0, 1.0, 1.0]]))
    assert linear(x, weight)[0, 0] == 258


def test_widened_and_reordered_weights_are_exact(rng):
    """Weights may be kept in float32; only their memory order may pick another sum."""
    given = inputs(CASES["seventeen_rows"], rng)
    x, weight = given["x"], given["weight"]
    assert np.array_equal(linear(x, weight), linear(x, weight.astype(F32)))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("width", "outs"), [(33, 7), (192, 176), (96, 384), (256, 192), (64, 1)])
def test_s09_a_row_has_the_same_bits_alone(width, outs, order, rng):
    x = rng.standard_normal((130, width)).astype(F32)
    weight = np.array(rng.standard_normal((outs, width)), F32, order=order)
    together = linear(x, weight)
    for count in (1, 2, 3, 8, 17, 65, 129):
        for start in (0, 1):
            rows = slice(start, start + count)
            assert linear(x[rows], weight).tobytes() == together[rows].tobytes()
    shuffled = rng.permutation(130)
    assert linear(x[shuffled], weight).tobytes() == together[shuffled].tobytes()


def test_a_matrix_product_would_break_the_law(rng):
    """The control: the same rows through one matrix product differ in some bit."""
    x = rng.standard_normal((65, 192)).astype(F32)
    weight = np.asfortranarray(rng.standard_normal((192, 192)).astype(F32))
    assert not np.array_equal(x @ weight.T, linear(x, weight))


def test_m01_a_nan_row_stays_by_itself(rng):
    given = inputs(CASES["seventeen_rows"], rng)
    clean = linear(**given)
    given["x"][5] = np.nan
    out = linear(**given)
    assert np.isnan(out[5].astype(F32)).all()
    assert np.array_equal(np.delete(out, 5, 0), np.delete(clean, 5, 0))


def test_widths_that_differ_are_named():
    with pytest.raises(ValueError, match=r"weight \(3, 7\) does not fit rows of \(2, 8\)"):
        linear(np.zeros((2, 8), F32), np.zeros((3, 7), F32))
