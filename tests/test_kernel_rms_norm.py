"""The RMS norm kernel on the CPU executor: its rounding, its order, rows that lie apart."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.arguments import bf16
from ddtree_numba.kernels.rms_norm import make, rms_norm
from ddtree_numba.spec import rms_norm as spec
from ddtree_numba.spec.numerics import BF16, F32

CASES = {
    name: case | dict(T=min(case["T"], 3 if case["D"] > 500 else 17))
    for name, case in spec.CASES.items()
    if case["D"] % 8 == 0
}


def outputs(x, residual=None):
    return np.empty(x.shape, x.dtype) if residual is None else (np.empty_like(x), np.empty_like(x))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_agrees_with_the_specification(name, dtype, rng):
    given = spec.inputs(CASES[name], rng)
    given = {k: v.astype(dtype) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    expected = spec.rms_norm(**given)
    out = outputs(given["x"], given["residual"])
    assert rms_norm(**given, out=out) is out
    if given["residual"] is not None:
        assert out[1].tobytes() == expected[1].tobytes(), "the sum is exact"
        out, expected = out[0], expected[0]
    tolerance = spec.TOLERANCE if dtype == BF16 else dict(rtol=1e-6, atol=0)
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **tolerance)


@pytest.mark.parametrize("width", [64, 96, 192, 512, 1536])
def test_a_row_has_the_same_bits_alone(width, rng):
    x = rng.standard_normal((5, width)).astype(F32)
    weight = rng.uniform(0.5, 1.5, width).astype(F32)
    together = rms_norm(x, weight, 1e-5, out=outputs(x))
    for i in range(5):
        row = x[i : i + 1]
        assert rms_norm(row, weight, 1e-5, out=outputs(row)).tobytes() == together[i].tobytes()


def test_one_order_of_the_sum_for_every_instantiation_of_a_width(rng):
    """With and without residual, bfloat16 or float32 rows: the bits of y are the same."""
    x = rng.standard_normal((3, 1536)).astype(BF16)
    weight = rng.uniform(0.5, 1.5, 1536).astype(BF16)
    alone = rms_norm(x, weight, 1e-5, out=outputs(x))
    behind, _ = rms_norm(x, weight, 1e-5, np.zeros_like(x), out=outputs(x, x))
    assert behind.tobytes() == alone.tobytes()
    wide = rms_norm(x.astype(F32), weight, 1e-5, out=outputs(x.astype(F32)))
    assert wide.astype(BF16).tobytes() == alone.tobytes()


def test_rows_may_lie_apart(rng):
    """A slice of columns, as the latent part of a joint projection; gaps hold NaN."""
    wide = np.full((4, 176), np.nan, BF16)
    wide[:, 96:160] = rng.standard_normal((4, 64)).astype(BF16)
    part, weight = wide[:, 96:160], np.ones(64, BF16)
    expected = rms_norm(np.ascontiguousarray(part), weight, 1e-6, out=np.empty((4, 64), BF16))
    out = rms_norm(part, weight, 1e-6, out=np.empty((4, 64), BF16))
    assert out.tobytes() == expected.tobytes() and not np.isnan(out.astype(F32)).any()


def test_works_in_place(rng):
    x, residual = rng.standard_normal((2, 4, 192)).astype(BF16)
    expected = rms_norm(x, x[0], 1e-6, residual, out=outputs(x, x))
    y, total = x.copy(), residual.copy()
    rms_norm(y, x[0], 1e-6, total, out=(y, total))
    assert y.tobytes() == expected[0].tobytes() and total.tobytes() == expected[1].tobytes()


def test_m01_a_nan_row_stays_by_itself(rng):
    x = rng.standard_normal((3, 64)).astype(BF16)
    x[1] = np.nan
    out = rms_norm(x, np.ones(64, BF16), 1e-5, out=outputs(x)).astype(F32)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


def test_the_launch_takes_whole_warps_that_fit_a_multiprocessor():
    for width in (8, 64, 264, 7168, 18432):
        threads = make(width, bf16, bf16, False).threads
        assert threads % 32 == 0 and threads <= 512


def test_shapes_that_do_not_fit_are_named():
    x, weight = np.zeros((2, 16), BF16), np.zeros(16, BF16)
    with pytest.raises(ValueError, match=r"weight: shape \(8,\), expected \(16,\)"):
        rms_norm(x, weight[:8], 1e-6, out=outputs(x))
    with pytest.raises(ValueError, match=r"residual: shape \(1, 16\), expected \(2, 16\)"):
        rms_norm(x, weight, 1e-6, x[:1], out=outputs(x, x))
    with pytest.raises(ValueError, match="rows of 12, 12 apart, expected multiples of 8"):
        rms_norm(np.zeros((2, 12), BF16), np.zeros(12, BF16), 1e-6, out=np.zeros((2, 12), BF16))
    with pytest.raises(ValueError, match="are no rows"):
        rms_norm(np.zeros((16, 2), BF16).T, weight, 1e-6, out=outputs(x))
