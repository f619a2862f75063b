"""The gather over ranks: every bit in its place, stacked or joined."""

import numpy as np
import pytest

from ddtree_numba.spec.all_gather import CASES, all_gather, inputs
from ddtree_numba.spec.numerics import BF16
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
def test_every_element_has_its_place(name, rng):
    case = CASES[name]
    given = inputs(case, rng)
    parts, out = given["parts"], all_gather(**given)
    assert out.dtype == parts.dtype
    for s, t, i in np.ndindex(*parts.shape):
        place = (t, s * case["n"] + i) if case["joined"] else (s, t, i)
        assert out[place].tobytes() == parts[s, t, i].tobytes()


def test_what_is_stacked_is_a_copy():
    parts = np.zeros((2, 3), BF16)
    all_gather(parts)[:] = 1
    assert not parts.any()


def test_what_has_no_answer_is_an_error():
    with pytest.raises(ValueError, match="no ranks"):
        all_gather(np.zeros((0, 4)))
    with pytest.raises(ValueError, match="no axis"):
        all_gather(np.zeros(4), joined=True)
