"""The SwiGLU kernel on the CPU executor, against its specification."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.swiglu import swiglu
from ddtree_numba.spec import swiglu as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CPU = [name for name, case in spec.CASES.items() if case["I"] % 8 == 0 and name != "k26"]


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_agrees_with_the_specification(name, dtype, rng):
    gate_up = spec.inputs(spec.CASES[name], rng)["gate_up"].astype(dtype)
    expected = spec.swiglu(gate_up)
    out = np.empty_like(expected)
    assert swiglu(gate_up, out=out) is out
    tolerance = spec.TOLERANCE if dtype == BF16 else dict(rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **tolerance)


def test_limits_are_finite():
    gate = np.array([-1e4, -200, -100, 0, 100, 1e4, -0.0, 1], F32)
    out = swiglu(np.concatenate([gate, np.ones(8, F32)])[None], out=np.empty((1, 8), F32))
    assert np.array_equal(out[0, 3:6], gate[3:6])
    assert (np.abs(out[0, :3]) < 1e-40).all()


@pytest.mark.parametrize("half", [8, 256, 776])
def test_a_row_has_the_same_bits_alone(half, rng):
    gate_up = (rng.standard_normal((9, 2 * half)) * 4).astype(BF16)
    together = swiglu(gate_up, out=np.empty((9, half), BF16))
    for i in (0, 1, 8):
        alone = swiglu(gate_up[i : i + 1], out=np.empty((1, half), BF16))
        assert alone.tobytes() == together[i : i + 1].tobytes()


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="rows of 24, expected a multiple of 16"):
        swiglu(np.zeros((1, 24), F32), out=np.zeros((1, 12), F32))
    with pytest.raises(ValueError, match=r"out: shape \(1, 16\), expected \(1, 8\)"):
        swiglu(np.zeros((1, 16), F32), out=np.zeros((1, 16), F32))


@pytest.mark.gpu
@pytest.mark.parametrize("half", [256, 2304])
@pytest.mark.parametrize("rows", [1, 65, 4096])
def test_gpu_agrees_with_the_specification_and_a_row_with_itself_alone(half, rows, rng):
    gate_up = spec.inputs(dict(T=rows, I=half), rng)["gate_up"]
    together = to_host(swiglu(to_gpu(gate_up), out=to_gpu(np.empty((rows, half), BF16))))
    expected = spec.swiglu(gate_up)
    np.testing.assert_allclose(together.astype(F32), expected.astype(F32), **spec.TOLERANCE)
    for i in {0, rows // 2, rows - 1}:
        row = slice(i, i + 1)
        alone = swiglu(to_gpu(gate_up[row]), out=to_gpu(np.empty((1, half), BF16)))
        assert to_host(alone).tobytes() == together[row].tobytes()
