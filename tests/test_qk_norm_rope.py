"""The fused specification: the bits of its parts, rows and heads that do not know each other."""

import numpy as np
import pytest

from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.qk_norm_rope import CASES, inputs, qk_norm_rope
from ddtree_numba.spec.rms_norm import rms_norm
from ddtree_numba.spec.rope import rope
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_has_the_bits_of_its_parts(name, dtype, rng):
    given, case = inputs(CASES[name], rng), CASES[name]
    given |= {k: given[k].astype(dtype) for k in ("joint", "q_norm", "k_norm")}
    out = qk_norm_rope(**given)
    assert out.dtype == dtype
    turn = dict(interleaved=False, amplitude=given["amplitude"])
    for head in range(case["N"]):
        expected = np.ascontiguousarray(given["joint"][:, head])
        if head < case["queries"] + case["keys"]:
            norm = given["q_norm" if head < case["queries"] else "k_norm"]
            normed = rms_norm(expected, norm, given["eps"])
            expected = rope(normed, given["positions"], given["inv_freq"], **turn)
        assert out[:, head].tobytes() == expected.tobytes()


def test_a_row_has_the_same_bits_alone(rng):
    given = inputs(CASES["tiny"], rng)
    out = qk_norm_rope(**given)
    for i in (0, 4, 7):
        row = slice(i, i + 1)
        alone = given | dict(joint=given["joint"][row], positions=given["positions"][row])
        assert qk_norm_rope(**alone).tobytes() == out[row].tobytes()


def test_what_is_given_stays(rng):
    given = inputs(CASES["tiny"], rng)
    before = given["joint"].tobytes()
    qk_norm_rope(**given)
    assert given["joint"].tobytes() == before


def test_shapes_that_do_not_fit_are_named(rng):
    given = inputs(CASES["tiny"], rng)
    for change in (dict(queries=7), dict(queries=-1), dict(keys=-1), dict(keys=5)):
        counts = given | change
        message = f"does not have {counts['queries']} \\+ {counts['keys']} heads"
        with pytest.raises(ValueError, match=message):
            qk_norm_rope(**counts)
    with pytest.raises(ValueError, match="weight"):
        qk_norm_rope(**given | dict(k_norm=given["k_norm"][1:]))
    with pytest.raises(ValueError, match="do not fit x"):
        qk_norm_rope(**given | dict(positions=given["positions"][1:]))
