"""The key rows' kernel: bits pass through, views of any stride, nothing else is written."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.kv_append import kv_append
from ddtree_numba.spec import kv_append as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CASES = {name: case for name, case in spec.CASES.items() if case["D"] % 8 == case["P"] % 8 == 0}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_equals_the_specification(name, dtype, rng):
    given = {n: v.astype(dtype) for n, v in spec.inputs(CASES[name], rng).items()}
    expected = spec.kv_append(**given | dict(scratch=given["scratch"].copy()))
    assert kv_append(**given) is given["scratch"]
    assert given["scratch"].tobytes() == expected.tobytes()


def test_views_on_both_sides(rng):
    """Slices of a joint projection into a part of the scratch area; the rest stays."""
    joint = np.full((2, 17, 176), np.nan, BF16)
    joint[..., 96:] = rng.standard_normal((2, 17, 80)).astype(BF16)
    area = np.full((3, 20, 80), 7, BF16)
    kv_append(joint[..., 96:160], joint[..., 160:], area[:2, :17])
    assert area[:2, :17].tobytes() == np.ascontiguousarray(joint[..., 96:]).tobytes()
    area[:2, :17] = 7
    assert (area == 7).all()


def test_nan_and_its_bits_pass_through():
    latent = np.resize(np.array([0x7FC1, 0xFF81, 0x8000], np.uint16), 64).view(BF16)
    scratch = np.zeros((1, 1, 80), BF16)
    kv_append(latent.reshape(1, 1, 64), latent[:16].reshape(1, 1, 16), scratch)
    assert scratch.tobytes() == latent.tobytes() + latent[:16].tobytes()


def test_a_row_does_not_depend_on_its_company(rng):
    given = spec.inputs(dict(R=2, N=9, D=64, P=16), rng)
    together = kv_append(**given).copy()
    for r, i in np.ndindex(2, 9):
        at = slice(r, r + 1), slice(i, i + 1)
        row = np.empty((1, 1, 80), BF16)
        kv_append(given["latent"][at], given["k_rope"][at], row)
        assert row.tobytes() == together[at].tobytes()


def test_no_rows():
    empty = np.zeros((2, 0, 64), BF16)
    kv_append(empty, empty[..., :16], np.zeros((2, 0, 80), BF16))


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    latent, k_rope = np.zeros((1, 2, 64), BF16), np.zeros((1, 2, 16), BF16)
    scratch = np.zeros((1, 2, 80), BF16)
    for change, message in (
        (dict(scratch=scratch[:, :1]), "scratch: shape"),
        (dict(k_rope=k_rope[:, :1]), "k_rope: shape"),
        (dict(scratch=scratch.astype(F32)), "scratch: dtype float32, expected bfloat16"),
        (dict(latent=np.zeros((1, 2, 128), BF16)[..., ::2]), "latent: strides"),
        (dict(latent=np.zeros((1, 2, 65), BF16)[..., 1:]), "latent: strides"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            kv_append(**dict(latent=latent, k_rope=k_rope, scratch=scratch) | change)
    odd = spec.inputs(spec.CASES["odd"], np.random.default_rng(0))
    with pytest.raises(ValueError, match="latent: rows of 7, expected a multiple of 8"):
        kv_append(**odd)


@pytest.mark.gpu
@pytest.mark.parametrize("requests, nodes", [(1, 1), (1, 17), (64, 65), (1, 4096)])
def test_gpu_equals_the_specification(requests, nodes, rng):
    given = spec.inputs(dict(R=requests, N=nodes, D=512, P=64), rng)
    device = to_gpu(given)
    kv_append(**device)
    assert to_host(device["scratch"]).tobytes() == spec.kv_append(**given).tobytes()
