"""The fused specification: its two parts' bits, float64, rows that do not know each other."""

import numpy as np
import pytest

from ddtree_numba.spec.linear import linear
from ddtree_numba.spec.linear_swiglu import CASES, TOLERANCE, inputs, linear_swiglu
from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.swiglu import swiglu
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
def test_rounds_between_its_parts_and_agrees_with_float64(name, rng):
    given = inputs(CASES[name], rng)
    out = linear_swiglu(**given)
    assert out.dtype == BF16
    assert out.tobytes() == swiglu(linear(given["x"], given["weight"]).astype(BF16)).tobytes()
    gate, up = np.split(given["x"].astype(np.float64) @ given["weight"].astype(np.float64).T, 2, -1)
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(out.astype(np.float64), expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_row_has_the_same_bits_alone(dtype, rng):
    given = {k: v.astype(dtype) for k, v in inputs(dict(T=33, I=24, K=96), rng).items()}
    together = linear_swiglu(**given)
    for i in (0, 1, 16, 32):
        alone = linear_swiglu(given["x"][i : i + 1], given["weight"])
        assert alone.dtype == dtype and alone.tobytes() == together[i : i + 1].tobytes()


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"weight \(4, 3\) does not fit rows of \(1, 5\)"):
        linear_swiglu(np.zeros((1, 5), F32), np.zeros((4, 3), F32))
    with pytest.raises(ValueError, match=r"gate_up \(1, 3\) does not split into two halves"):
        linear_swiglu(np.zeros((1, 5), F32), np.zeros((3, 5), F32))
