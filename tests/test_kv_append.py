"""The nodes' key rows reach the scratch area bit for bit, and nothing else changes."""

import numpy as np
import pytest

from ddtree_numba.spec.kv_append import CASES, inputs, kv_append
from ddtree_numba.spec.numerics import BF16, F32
from tests.cases import small


@pytest.mark.parametrize("name", small(CASES))
def test_rows_are_latent_then_rope(name, rng):
    given = inputs(CASES[name], rng)
    out = kv_append(**given)
    assert out is given["scratch"]
    expected = np.concatenate([given["latent"], given["k_rope"]], axis=-1)
    assert out.tobytes() == expected.tobytes()


def test_writes_through_a_view_and_leaves_the_rest(rng):
    given = inputs(CASES["two_requests"], rng)
    area = np.full((3, 20, 80), np.nan, BF16)  # more slots and nodes than this step has
    kv_append(given["latent"], given["k_rope"], area[:2, :17])
    assert np.isfinite(area[:2, :17].astype(F32)).all()
    area[:2, :17] = np.nan
    assert np.isnan(area.astype(F32)).all()


def test_nan_and_its_bits_pass_through():
    latent = np.array([0x7FC1, 0xFF81], np.uint16).view(BF16).reshape(1, 1, 2)
    scratch = kv_append(latent, latent[..., :1], np.zeros((1, 1, 3), BF16))
    assert scratch.view(np.uint16).tolist() == [[[0x7FC1, 0xFF81, 0x7FC1]]]


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    latent, k_rope = np.zeros((1, 2, 4), F32), np.zeros((1, 2, 2), F32)
    with pytest.raises(ValueError, match="do not fit scratch"):
        kv_append(latent, k_rope, np.zeros((1, 2, 5), F32))
    with pytest.raises(ValueError, match="do not fit scratch"):
        kv_append(latent, k_rope[:, :1], np.zeros((1, 2, 6), F32))
    with pytest.raises(ValueError, match="scratch bfloat16 must agree"):
        kv_append(latent, k_rope, np.zeros((1, 2, 6), BF16))
