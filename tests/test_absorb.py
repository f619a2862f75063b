"""Head-wise products against float64, and rows and heads that do not know each other."""

import numpy as np
import pytest

from ddtree_numba.spec.absorb import CASES, absorb, inputs
from ddtree_numba.spec.numerics import BF16, F32
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_float64_up_to_one_rounding(name, rng):
    given = inputs(CASES[name], rng)
    out = absorb(**given)
    x, weight = given["x"].astype(np.float64), given["weight"].astype(np.float64)
    expected = np.einsum("tha,hab->thb", x, weight)
    assert out.dtype == BF16
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2**-8 * 1.01, atol=2e-6)


@pytest.mark.parametrize(("ins", "outs"), [(32, 64), (64, 32), (7, 5)])
def test_a_row_and_a_head_have_the_same_bits_alone(ins, outs, rng):
    x = rng.standard_normal((65, 8, ins)).astype(F32)
    weight = rng.standard_normal((8, ins, outs)).astype(F32)
    together = absorb(x, weight)
    for i in (0, 1, 16, 63, 64):
        assert absorb(x[i : i + 1], weight).tobytes() == together[i : i + 1].tobytes()
    for heads in (slice(0, 1), slice(3, 5), slice(7, 8)):  # a rank's share of the heads
        assert absorb(x[:, heads], weight[heads]).tobytes() == together[:, heads].tobytes()


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"weight \(2, 4, 3\) does not fit rows of \(1, 2, 5\)"):
        absorb(np.zeros((1, 2, 5), F32), np.zeros((2, 4, 3), F32))
