"""The RMS norm kernel on the CPU executor: its rounding, its order, rows that lie apart."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.arguments import bf16
from ddtree_numba.kernels.rms_norm import make, rms_norm, shape_of
from ddtree_numba.spec import rms_norm as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

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


@pytest.mark.parametrize("width", [8, 64, 264, 512, 776, 1536, 1544, 7168, 18432])
def test_a_block_holds_its_rows_in_whole_warps(width):
    each, warps, rows = shape_of(width)
    assert 32 * warps * each * 8 >= width > 32 * warps * (each - 1) * 8
    made = make(width, bf16, bf16, False)
    assert made.threads == 32 * warps * rows <= 512


def test_the_weight_does_not_wait_for_the_kernel_ahead():
    for residual in (False, True):
        text = make(1536, bf16, bf16, residual).ptx("sm_90")
        before, behind = text.split("griddepcontrol.wait")
        assert before.count("ld.global.v4.u32") == 3
        assert behind.count("ld.global.v4.u32") == (6 if residual else 3)


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k26", "k26_q_a", "k26_kv_a"])
@pytest.mark.parametrize("rows", [1, 65, 4096])
def test_gpu_agrees_with_the_specification_and_a_row_with_itself_alone(name, rows, rng):
    given = spec.inputs(spec.CASES[name] | dict(T=rows), rng)
    expected = spec.rms_norm(**given)
    device = to_gpu(given)
    y = to_gpu(outputs(given["x"], given["residual"]))
    together = to_host(rms_norm(**device, out=y))
    if given["residual"] is not None:
        assert together[1].tobytes() == expected[1].tobytes()
        together, expected = together[0], expected[0]
    np.testing.assert_allclose(together.astype(F32), expected.astype(F32), **spec.TOLERANCE)
    for i in {0, rows // 2, rows - 1}:
        row = slice(i, i + 1)
        one = to_gpu({n: given[n][row] for n in ("x", "residual") if given[n] is not None})
        out = to_gpu(outputs(given["x"][row], one.get("residual")))
        alone = rms_norm(weight=device["weight"], eps=given["eps"], **one, out=out)
        alone = alone[0] if isinstance(alone, tuple) else alone
        assert to_host(alone).tobytes() == together[row].tobytes()
