"""The fused specification: the bits of its parts, rows and heads that do not know each other."""

import numpy as np
import pytest

from ddtree_numba.spec.absorb import absorb
from ddtree_numba.spec.absorb_rope import CASES, absorb_rope, inputs
from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.rope import rope
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_has_the_bits_of_its_parts(name, dtype, rng):
    given, case = inputs(CASES[name], rng), CASES[name]
    q = given["q"] = given["q"].astype(dtype)
    query = absorb_rope(**given)
    assert query.dtype == dtype
    latent = absorb(np.ascontiguousarray(q[..., : case["a"]]), given["weight"])
    assert query[..., : case["b"]].tobytes() == latent.tobytes()
    turned = np.ascontiguousarray(q[..., case["a"] :])
    turned = rope(turned, given["positions"], given["inv_freq"], amplitude=given["amplitude"])
    assert query[..., case["b"] :].tobytes() == turned.tobytes()


def test_a_row_and_a_head_have_the_same_bits_alone(rng):
    given = inputs(CASES["tiny"], rng)
    query = absorb_rope(**given)
    for i in (0, 8, 16):
        alone = dict(q=given["q"][i : i + 1], positions=given["positions"][i : i + 1])
        assert absorb_rope(**given | alone).tobytes() == query[i].tobytes()
    heads = dict(q=given["q"][:, 3:5], weight=given["weight"][3:5])
    assert absorb_rope(**given | heads).tobytes() == query[:, 3:5].tobytes()


def test_shapes_that_do_not_fit_are_named(rng):
    given = inputs(CASES["one_row"], rng)
    with pytest.raises(ValueError, match=r"inv_freq \(8,\) do not fit q \(1, 8, 40\)"):
        absorb_rope(**given | dict(q=given["q"][..., 8:]))
    with pytest.raises(ValueError, match="does not fit rows of"):
        absorb_rope(**given | dict(q=given["q"][:, :2]))
    with pytest.raises(ValueError, match=r"positions \(2,\)"):
        absorb_rope(**given | dict(positions=np.zeros(2, int)))
