"""Projection and SwiGLU in one: the bits of the two kernels, in however many parts K is."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.linear import SMALL, Way, linear, way_of
from ddtree_numba.kernels.linear_order import Order, order_of
from ddtree_numba.kernels.linear_swiglu import instances, linear_swiglu, make, workspace
from ddtree_numba.kernels.swiglu import swiglu
from ddtree_numba.spec import linear_swiglu as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CASES = {k: c for k, c in spec.CASES.items() if c["I"] % 8 == 0 and not k.startswith("k26")}


def run(x, weight, way=None):
    """On numpy arrays, with a poisoned workspace."""
    shape, dtype = workspace(len(x), *weight.shape)
    if way:
        shape, dtype = (way.parts, len(x), len(weight)), F32
    space, out = np.full(shape, np.nan, dtype), np.empty((len(x), len(weight) // 2), BF16)
    assert linear_swiglu(x, weight, out=out, workspace=space, way=way) is out
    return out


def apart(x, weight):
    """By the two kernels."""
    parts = np.empty(way_of(len(x), *weight.shape).parts * len(x) * len(weight), F32)
    gate_up = linear(x, weight, out=np.empty((len(x), len(weight)), BF16), workspace=parts)
    return swiglu(gate_up, out=np.empty((len(x), len(weight) // 2), BF16))


@pytest.mark.parametrize("name", CASES)
def test_has_the_bits_of_the_two_kernels_and_agrees_with_the_specification(name, rng):
    given = spec.inputs(CASES[name], rng)
    out = run(**given)
    assert out.tobytes() == apart(**given).tobytes()
    expected = spec.linear_swiglu(**given)
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **spec.TOLERANCE)


@pytest.mark.parametrize("parts", [2, 3, 4, 5, 8, 9])
def test_any_number_of_parts_is_added_in_order_and_rounded_before_the_gate(parts, rng):
    """The kernel alone, on sums in which order and a rounding left out would show."""
    rows, half = 3, 24
    sums = rng.standard_normal((parts, rows, 2 * half)).astype(F32)
    sums[rng.random(sums.shape) < 0.3] *= F32.type(1e4)
    sums[:, 1, :8] = -0.0
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    expected = swiglu(total.astype(BF16), out=np.empty((rows, half), BF16))
    out = np.empty((rows, half), BF16)
    make(half).launch(1, sums, out, rows, parts)
    assert out.tobytes() == expected.tobytes()


def test_s09_a_row_has_the_same_bits_alone_and_in_another_cut_of_k(rng):
    given = spec.inputs(dict(T=9, I=8, K=512), rng)
    x, weight = given["x"], given["weight"]
    together = run(x, weight)
    order = order_of(16, 512)
    assert order.slices > 1 and way_of(9, 16, 512).parts == 1
    assert run(x, weight, Way(SMALL, 0, order.slices)).tobytes() == together.tobytes()
    for i in (0, 8):
        assert run(x[i : i + 1], weight).tobytes() == together[i : i + 1].tobytes()


def test_s09_m01_a_row_has_the_same_bits_alone_and_beside_nan(rng):
    given = spec.inputs(CASES["long_rows"], rng)
    assert order_of(16, 4096) == Order(groups=4, slices=4, units=1)
    given["x"][1] = np.nan
    together = run(**given)
    assert np.isnan(together[1].astype(F32)).all()
    for i in (0, 2):
        alone = run(given["x"][i : i + 1], given["weight"])
        assert alone.tobytes() == together[i : i + 1].tobytes()


def test_two_launches_where_k_is_in_parts(rng, monkeypatch):
    """K2.6's shared expert: the projection, and what adds and gates."""
    names = []
    monkeypatch.setattr(Kernel, "launch", lambda self, *_, **__: names.append(self.name))
    for rows in (1, 9, 65):
        x, weight = np.zeros((rows, 7168), BF16), np.zeros((512, 7168), BF16)
        space = np.zeros(*workspace(rows, 512, 7168))
        linear_swiglu(x, weight, out=np.zeros((rows, 256), BF16), workspace=space)
    assert len(names) == 6 and names[1::2] == ["sum_swiglu_256"] * 3


def test_instances_are_what_k26_takes_at_any_number_of_ranks():
    halves = {n // ranks for n in (2048, 18432) for ranks in (1, 2, 4, 8)}
    rows = range(1, 4097, 8)  # a way changes behind a multiple of 8
    shared = {n for n in halves if any(way_of(t, 2 * n, 7168).parts > 1 for t in rows)}
    assert {kernel.name for kernel in instances()} == {f"sum_swiglu_{n}" for n in shared}


def test_what_does_not_fit_is_named():
    x, weight, out = np.zeros((2, 4096), BF16), np.zeros((16, 4096), BF16), np.zeros((2, 8), BF16)
    space = np.zeros((4, 2, 16), F32)
    good = dict(x=x, weight=weight, out=out, workspace=space)
    for change, message in (
        (dict(x=x[:, :8]), r"weight \(16, 4096\) does not fit rows of \(2, 8\)"),
        (dict(x=x.astype(F32)), "x: dtype float32, expected bfloat16"),
        (dict(weight=weight[:12]), "weight: 12 rows, expected a multiple of 16"),
        (dict(out=out[:1]), r"out: shape \(1, 8\), expected \(2, 8\)"),
        (dict(out=out.astype(F32)), "out: dtype float32, expected bfloat16"),
        (dict(workspace=space[:3]), r"workspace: shape \(3, 2, 16\), expected \(4, 2, 16\)"),
        (dict(workspace=space.astype(BF16)), "workspace: dtype bfloat16, expected float32"),
        (
            dict(x=x[:, :256].copy(), weight=weight[:, :256].copy()),
            r"workspace: shape \(4, 2, 16\), expected \(2, 16\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            linear_swiglu(**good | change)


@pytest.mark.gpu
@pytest.mark.parametrize("half, width", [(256, 7168), (1024, 7168), (2304, 7168), (512, 192)])
def test_gpu_has_the_bits_of_the_two_kernels(half, width, rng):
    x = rng.standard_normal((129, width)).astype(BF16)
    weight = to_gpu((rng.standard_normal((2 * half, width)) / width**0.5).astype(BF16))
    for rows in (1, 9, 17, 65, 129):
        part = to_gpu(x[:rows])
        space = to_gpu(np.zeros(*workspace(rows, 2 * half, width)))
        out = to_gpu(np.zeros((rows, half), BF16))
        got = to_host(linear_swiglu(part, weight, out=out, workspace=space))
        parts = to_gpu(np.zeros(way_of(rows, 2 * half, width).parts * rows * 2 * half, F32))
        gate_up = to_gpu(np.zeros((rows, 2 * half), BF16))
        linear(part, weight, out=gate_up, workspace=parts)
        expected = swiglu(gate_up, out=to_gpu(np.zeros((rows, half), BF16)))
        assert got.tobytes() == to_host(expected).tobytes()
