"""Token embedding: exact rows, zeros for absent and padding ids, shards that add up."""

import numpy as np
import pytest

from ddtree_numba.spec.all_reduce import all_reduce
from ddtree_numba.spec.embed import CASES, embed, inputs
from ddtree_numba.spec.numerics import BF16, F32
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
def test_rows_are_copied_and_others_are_zero(name, rng):
    given = inputs(CASES[name], rng)
    out = embed(**given)
    table, first = given["table"], given["first_row"]
    for row, token in zip(out, given["token_ids"], strict=True):
        held = first <= token < first + len(table)
        expected = table[token - first] if held else np.zeros(table.shape[1], BF16)
        assert row.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_shards_add_up_to_the_whole_table(ranks, rng):
    table = rng.standard_normal((64, 16)).astype(BF16)
    token_ids = np.array([0, 7, 8, 31, 32, 63, -1], np.int32)
    rows = 64 // ranks
    shards = [embed(token_ids, table[r * rows :][:rows], r * rows) for r in range(ranks)]
    assert np.array_equal(all_reduce(np.stack(shards)), embed(token_ids, table))


def test_m01_absent_rows_read_nothing():
    table = np.full((4, 3), np.nan, F32)
    assert np.array_equal(embed(np.array([-1, 4, 2**31 - 1]), table), np.zeros((3, 3), F32))
    assert np.isnan(embed(np.array([3]), table)).all()


def test_dtype_rounds_a_widened_table_back(rng):
    table = rng.standard_normal((4, 8)).astype(BF16)
    out = embed(np.array([2]), table.astype(F32), dtype=BF16)
    assert out.dtype == BF16 and np.array_equal(out[0], table[2])
