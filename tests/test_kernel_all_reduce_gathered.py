"""The ordered sum of gathered partials, on the CPU executor and on a GPU."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.all_reduce_gathered import sum_gathered
from ddtree_numba.spec import all_reduce as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", [name for name, case in spec.CASES.items() if case["H"] == 192])
def test_agrees_with_the_specification(name, dtype, rng):
    partials = spec.inputs(spec.CASES[name], rng)["partials"].astype(dtype)
    partials *= np.exp2(rng.integers(-32, 32, partials.shape)).astype(dtype)
    out = np.empty(partials.shape[1:], dtype)
    assert sum_gathered(partials, out=out) is out
    assert out.tobytes() == spec.all_reduce(partials).tobytes()


def test_the_order_is_that_of_the_ranks():
    partials = np.ones((8, 16), BF16)
    partials[:2] = [[1e30], [-1e30]]
    assert (sum_gathered(partials, out=np.empty(16, BF16)) == 6).all()
    assert (sum_gathered(partials[::-1].copy(), out=np.empty(16, BF16)) == 0).all()


def test_what_does_not_fit_is_named():
    x = np.zeros((2, 3, 8), BF16)
    with pytest.raises(ValueError, match="partials: 17 ranks, from 1 to 16 are possible"):
        sum_gathered(np.zeros((17, 8), BF16), out=x[0])
    with pytest.raises(ValueError, match=r"out: shape \(2, 3, 8\), expected \(3, 8\)"):
        sum_gathered(x, out=x)
    with pytest.raises(ValueError, match="out: 8 bytes, expected a multiple of 16"):
        sum_gathered(np.zeros((2, 4), BF16), out=np.zeros(4, BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [pytest.param(1, id="small-1"), 17, 4096])
def test_gpu_agrees_with_the_specification(rows, rng):
    partials = spec.inputs(spec.CASES["k26"] | dict(T=rows), rng)["partials"]
    out = to_gpu(np.empty(partials.shape[1:], BF16))
    got = to_host(sum_gathered(to_gpu(partials), out=out))
    assert got.tobytes() == spec.all_reduce(partials).tobytes()
