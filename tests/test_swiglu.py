"""SwiGLU against float64, its limits, and values that do not know their neighbours."""

import numpy as np
import pytest

from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.swiglu import CASES, inputs, swiglu
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_float64_up_to_one_rounding(name, rng):
    gate_up = inputs(CASES[name], rng)["gate_up"]
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    expected = gate / (1 + np.exp(-gate)) * up
    out = swiglu(gate_up)
    assert out.dtype == BF16
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2**-8 * 1.01, atol=1e-30)


def test_gate_comes_first():
    out = swiglu(np.array([[0.0, 20.0, 5.0, 3.0]], F32))
    assert out[0, 0] == 0 and out[0, 1] == pytest.approx(60)


def test_limits_are_finite():
    gate = np.array([-1e4, -200.0, -100.0, 0.0, 100.0, 1e4], F32)
    out = swiglu(np.concatenate([gate, np.ones(6, F32)])[None])
    assert np.array_equal(out[0, 3:], gate[3:])
    assert (np.abs(out[0, :3]) < 1e-40).all()


@pytest.mark.parametrize("half", [1, 7, 16, 256])
def test_a_row_has_the_same_bits_alone(half, rng):
    """Also a proof that exp has no lane of its own: every offset and odd length is tried."""
    gate_up = (rng.standard_normal((67, 2 * half)) * 4).astype(F32)
    together = swiglu(gate_up)
    for i in range(67):
        assert swiglu(gate_up[i : i + 1]).tobytes() == together[i : i + 1].tobytes()
    assert np.array_equal(swiglu(np.asfortranarray(gate_up)), together)
    assert np.array_equal(swiglu(np.repeat(gate_up, 2, axis=1)[:, ::2]), together)
    for start in range(0, 67, 9):
        for count in (1, 2, 3, 5, 31):
            rows = slice(start, start + count)
            assert swiglu(gate_up[rows]).tobytes() == together[rows].tobytes()


def test_an_odd_width_is_named():
    with pytest.raises(ValueError, match=r"\(1, 3\) does not split"):
        swiglu(np.zeros((1, 3), F32))
