"""The embedding kernel on the CPU executor: its specification's bits."""

import re

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.embed import embed, instances
from ddtree_numba.spec import embed as spec
from ddtree_numba.spec.numerics import BF16, F32

CPU = [name for name, case in spec.CASES.items() if case["H"] % 8 == 0 and name != "k26"]


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("stored, result", [(BF16, BF16), (BF16, F32), (F32, F32), (F32, BF16)])
def test_equals_the_specification(name, stored, result, rng):
    given = spec.inputs(spec.CASES[name], rng)
    given["table"] = given["table"].astype(stored)
    expected = spec.embed(**given, dtype=result)
    out = np.empty_like(expected)
    assert embed(**given, out=out) is out
    assert out.tobytes() == expected.tobytes()


def test_m01_absent_and_padding_ids_read_nothing():
    table = np.full((4, 8), np.nan, F32)
    out = np.empty((3, 8), F32)
    assert not embed(np.array([-1, 4, 2**31 - 1], np.int32), table, out=out).any()
    assert np.isnan(embed(np.array([3, 3, 3], np.int32), table, out=out)).all()


def test_m07_offsets_are_counted_in_64_bits():
    """K2.6's whole table is beyond 2^31 bytes; no product that makes an offset has 32 bits."""
    assert 163_840 * 7_168 * 2 > 2**31
    for made in instances():
        text = made.ptx("sm_120")
        assert re.search(r"mul\.(wide\.s32|lo\.s64)", text) and "mul.lo.s32" not in text


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    ids, table, out = np.zeros(2, np.int32), np.zeros((4, 8), BF16), np.zeros((2, 8), BF16)
    with pytest.raises(ValueError, match="token_ids: dtype int64, expected int32"):
        embed(ids.astype(np.int64), table, out=out)
    with pytest.raises(ValueError, match=r"out: shape \(2, 8\), expected \(1, 8\)"):
        embed(ids[:1], table, out=out)
    with pytest.raises(ValueError, match="rows of 12, expected a multiple of 8"):
        embed(ids, np.zeros((4, 12), BF16), out=np.zeros((2, 12), BF16))
    with pytest.raises(ValueError, match="table: dtype float64, expected bfloat16 or float32"):
        embed(ids, table.astype(float), out=out)
    with pytest.raises(ValueError, match="out: not contiguous"):
        embed(ids, table, out=np.zeros((8, 2), BF16).T)
