"""The ordered sum over ranks: exact, in rank order, rounded once."""

import numpy as np
import pytest

from ddtree_numba.spec.all_reduce import CASES, all_reduce, inputs
from ddtree_numba.spec.numerics import BF16, F32, bf16
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_a_sum_of_scalars(name, rng):
    partials = inputs(CASES[name], rng)["partials"]
    out = all_reduce(partials)
    for index in np.ndindex(*out.shape):
        total = F32.type(0)
        for partial in partials:
            total = F32.type(total + F32.type(partial[index]))
        assert out[index] == bf16(total)


def test_rounds_once():
    """256 + 1 + 1 over three ranks is 258; a sum kept in bfloat16 would stay at 256."""
    assert all_reduce(bf16(np.array([256.0, 1.0, 1.0]))) == 258


def test_order_is_the_ranks_order():
    partials = np.array([[1.0], [2.0**30], [-(2.0**30)]], F32)
    assert all_reduce(partials) == 0
    assert all_reduce(partials[::-1]) == 1


def test_a_row_has_the_same_bits_alone(rng):
    partials = rng.standard_normal((8, 65, 33)).astype(BF16)
    together = all_reduce(partials)
    for i in (0, 1, 17, 64):
        assert all_reduce(partials[:, i : i + 1]).tobytes() == together[i : i + 1].tobytes()


def test_partials_are_left_alone(rng):
    partials = rng.standard_normal((2, 3, 4)).astype(F32)
    before = partials.copy()
    all_reduce(partials)
    assert np.array_equal(partials, before)


def test_no_ranks_is_an_error():
    with pytest.raises(ValueError, match="no ranks"):
        all_reduce(np.zeros((0, 3, 4), F32))
