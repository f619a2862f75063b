"""RMS norm against float64, its two roundings, and rows that do not know each other."""

import numpy as np
import pytest

from ddtree_numba.spec.numerics import BF16, F32, bf16
from ddtree_numba.spec.rms_norm import CASES, inputs, rms_norm
from tests.cases import small


def dense(x, weight, eps):
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_float64_up_to_one_rounding(name, rng):
    given = inputs(CASES[name], rng)
    x, residual = given["x"], given["residual"]
    out = rms_norm(**given)
    if residual is not None:
        out, total = out
        assert np.array_equal(total, bf16(x.astype(F32) + residual.astype(F32)))
        x = total
    expected = dense(x, given["weight"], given["eps"])
    assert out.dtype == BF16
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2**-8 * 1.01, atol=1e-30)


def test_float32_is_left_unrounded(rng):
    x, weight = rng.standard_normal((3, 192)).astype(F32), rng.uniform(0.5, 1.5, 192).astype(F32)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6), dense(x, weight, 1e-6), rtol=1e-6)


def test_the_stored_residual_is_what_is_normed():
    """1 + 2^-9 is 1 in bfloat16: a norm of the unrounded sum would see the two entries differ."""
    x = bf16(np.array([[1.0, 1.0]]))
    residual = bf16(np.array([[2.0**-9, 0.0]]))
    out, total = rms_norm(x.astype(BF16), bf16(np.full(2, 3.0)), 0.0, residual)
    assert total.tolist() == [[1.0, 1.0]] and out[0, 0] == out[0, 1] == 3.0
    wide, _ = rms_norm(x.astype(F32), np.full(2, 3, F32), 0.0, residual.astype(F32))
    assert wide[0, 0] != wide[0, 1]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("width", [1, 33, 64, 96, 192])
def test_a_row_has_the_same_bits_alone(width, dtype, rng):
    x = rng.standard_normal((70, width)).astype(dtype)
    weight = rng.uniform(0.5, 1.5, width).astype(F32)
    together = rms_norm(x, weight, 1e-5)
    for i in (0, 1, 2, 15, 16, 17, 63, 64, 69):
        assert rms_norm(x[i : i + 1], weight, 1e-5).tobytes() == together[i : i + 1].tobytes()
    wider = np.tile(x, (1, 5))[:, 3 : 3 + width]  # rows apart, another alignment
    expected = rms_norm(np.ascontiguousarray(wider), weight, 1e-5)
    for layout in (wider, np.asfortranarray(wider), wider[:, ::-1][:, ::-1]):
        assert rms_norm(layout, weight, 1e-5).tobytes() == expected.tobytes()


def test_m01_a_nan_row_stays_by_itself(rng):
    x = rng.standard_normal((5, 64)).astype(BF16)
    clean = rms_norm(x, np.ones(64, F32), 1e-5)
    x[2] = np.nan
    out = rms_norm(x, np.ones(64, F32), 1e-5)
    assert np.isnan(out[2].astype(F32)).all()
    assert np.array_equal(np.delete(out, 2, 0), np.delete(clean, 2, 0))


def test_zeros_give_zeros():
    assert not rms_norm(np.zeros((2, 8), BF16), np.ones(8, BF16), 1e-6).astype(F32).any()


def test_shapes_that_do_not_fit_are_named():
    x = np.zeros((2, 8), F32)
    with pytest.raises(ValueError, match=r"weight \(7,\)"):
        rms_norm(x, np.ones(7, F32), 1e-6)
    with pytest.raises(ValueError, match=r"residual \(1, 8\)"):
        rms_norm(x, np.ones(8, F32), 1e-6, x[:1])
