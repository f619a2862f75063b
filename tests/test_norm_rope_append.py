"""The fused specification: the bits of its parts, rows that do not know each other."""

import numpy as np
import pytest

from ddtree_numba.spec.norm_rope_append import CASES, inputs, norm_rope_append
from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.rms_norm import rms_norm
from ddtree_numba.spec.rope import rope
from tests.cases import small


def in_order(joint, q_width, case):
    """The columns of ranks' parts, one by one: those of q_a first."""
    shards = case.get("shards", 1)
    part, q_part = joint.shape[1] // shards, q_width // shards
    first = [c for c in range(joint.shape[1]) if c % part < q_part]
    return joint[:, first + [c for c in range(joint.shape[1]) if c % part >= q_part]]


@pytest.mark.parametrize("name", small(CASES))
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_has_the_bits_of_its_parts(name, dtype, rng):
    given, case = inputs(CASES[name], rng), CASES[name]
    given |= {k: given[k].astype(dtype) for k in ("joint", "q_norm", "kv_norm", "scratch")}
    q = norm_rope_append(**given)
    first, second = case["Q"], case["Q"] + case["D"]
    q_a, latent, k_rope = (
        np.ascontiguousarray(p)
        for p in np.split(in_order(given["joint"], first, case), [first, second], 1)
    )
    assert q.tobytes() == rms_norm(q_a, given["q_norm"], given["eps"]).tobytes()
    turned = rope(k_rope, given["positions"], given["inv_freq"], amplitude=given["amplitude"])
    rows = np.concatenate([rms_norm(latent, given["kv_norm"], given["eps"]), turned], axis=1)
    assert given["scratch"].dtype == dtype and given["scratch"].tobytes() == rows.tobytes()


def test_a_row_has_the_same_bits_alone(rng):
    given = inputs(CASES["tiny"], rng)
    q = norm_rope_append(**given)
    for i in (0, 8, 16):
        row = slice(i, i + 1)
        alone = given | dict(joint=given["joint"][row], positions=given["positions"][row])
        alone["scratch"] = np.empty_like(given["scratch"][row])
        assert norm_rope_append(**alone).tobytes() == q[row].tobytes()
        assert alone["scratch"].tobytes() == given["scratch"][row].tobytes()


def test_shapes_that_do_not_fit_are_named(rng):
    given = inputs(CASES["one_row"], rng)
    with pytest.raises(ValueError, match=r"rows of joint \(1, 168\) are not of \(96, 64, 16\)"):
        norm_rope_append(**given | dict(joint=given["joint"][:, 8:]))
    with pytest.raises(ValueError, match="do not fit scratch"):
        norm_rope_append(**given | dict(scratch=given["scratch"][:, 8:]))
    with pytest.raises(ValueError, match="scratch float32 must agree"):
        norm_rope_append(**given | dict(scratch=given["scratch"].astype(F32)))
