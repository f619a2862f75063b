"""The linear kernels on the CPU executor and, marked gpu, at published sizes: one order of the sum
whatever the number of rows, the kernel, its tile and its cut along K."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import linear_narrow, linear_wide
from ddtree_numba.kernels.arguments import bf16
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.linear import (
    FLAT,
    LARGE,
    LOGITS,
    SHAPES,
    SMALL,
    TINY,
    Way,
    instances,
    linear,
    way_of,
    workspace_floats,
)
from ddtree_numba.kernels.linear_order import Order, order_of
from ddtree_numba.spec import linear as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host
from tests.machine_code import before_the_wait

CASES = dict(
    one_row=dict(T=1, N=192, K=256),
    no_row=dict(T=0, N=192, K=256),
    seventeen_rows=dict(T=17, N=40, K=192),
    forty_rows=dict(T=40, N=16, K=128),
    logits=dict(T=5, N=72, K=192, out_dtype=F32),
    odd_rows_of_the_weight=dict(T=9, N=21, K=264),
    one_by_eight=dict(T=2, N=1, K=8),
    two_slices=dict(T=3, N=33, K=512),
    groups=dict(T=2, N=9, K=4096),
    no_row_in_groups=dict(T=0, N=9, K=4096),
)
PUBLISHED = {name: case for name, case in spec.CASES.items() if name.startswith("k26")}
WIDE = Way(SMALL, 0, 1)


def run(x, weight, out_dtype=BF16, way=None):
    """On numpy arrays, with a poisoned workspace."""
    outs, width = weight.shape
    floats = way.parts * len(x) * outs if way else workspace_floats(len(x), outs, width)
    workspace = np.full(floats, np.nan, F32) if floats else None
    out = np.empty((len(x), outs), out_dtype)
    return linear(x, weight, out=out, workspace=workspace, way=way)


def given(T, N, K, rng, **_):
    x = rng.standard_normal((T, K)).astype(BF16)
    return x, (rng.standard_normal((N, K)) / np.sqrt(K)).astype(BF16)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_specification(name, rng):
    case = CASES[name]
    x, weight = given(**case, rng=rng)
    out_dtype = case.get("out_dtype", BF16)
    expected = spec.linear(x, weight, out_dtype)
    tolerance = spec.TOLERANCE if out_dtype == BF16 else dict(rtol=1e-5, atol=1e-5)
    out = run(x, weight, out_dtype)
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **tolerance)


def test_rounds_once_at_the_end():
    """256 + 1 + 1 is 258, within a slice and across slices; a sum kept in bfloat16 stays at 256."""
    x, weight = np.zeros((1, 512), BF16), np.ones((1, 512), BF16)
    for ones in ((1, 2), (300, 511)):
        x[...] = 0
        x[0, [0, *ones]] = 256, 1, 1
        assert run(x, weight) == 258


def test_s09_a_row_has_the_same_bits_alone(rng):
    x, weight = given(33, 17, 264, rng)
    together = run(x, weight, F32)
    for count in (1, 2, 8, 9, 17, 25):
        assert run(x[7 : 7 + count], weight, F32).tobytes() == together[7 : 7 + count].tobytes()
    order = rng.permutation(33)
    assert run(x[order], weight, F32).tobytes() == together[order].tobytes()


def test_s09_a_tree_of_64_nodes_and_its_root_has_the_same_bits_in_nine_tiles(rng):
    """Where a group has six slices; wide blocks come behind 72 rows, elsewhere behind 40."""
    x, weight = given(65, 16, 1536, rng)
    assert [way_of(t, 16, 1536).columns for t in (40, 41, 72, 73)] == [5, 9, 9, 0]
    assert [way_of(t, 16, 1280).columns for t in (40, 41)] == [5, 0]
    together = run(x, weight, F32)
    for first, way in ((0, None), (30, None), (63, None), (63, WIDE)):
        few = slice(first, first + 2)
        assert run(x[few], weight, F32, way=way).tobytes() == together[few].tobytes()
    np.testing.assert_allclose(together, spec.linear(x, weight, F32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "width, slices, columns",
    [(2048, 8, 9), (3584, 14, 9), (1280, 5, 0), (4096, 4, 0)],
    ids=["eight_warps", "fourteen_warps", "wide_shared", "wide_groups"],
)
def test_s09_a_row_has_the_same_bits_alone_and_among_41(width, slices, columns, rng):
    """Nine tiles, weights four steps ahead or one; wide blocks that share slices, or groups."""
    x, weight = given(41, 3, width, rng)
    assert order_of(3, width).slices == slices and way_of(41, 3, width).columns == columns
    together = run(x, weight, F32)
    for i in (0, 40):
        assert run(x[i : i + 1], weight, F32).tobytes() == together[i : i + 1].tobytes()
    np.testing.assert_allclose(together, spec.linear(x, weight, F32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "tile, width, parts, out_dtype",
    [(SMALL, 512, 1, F32), (LARGE, 264, 2, BF16), (FLAT, 320, 1, BF16)],
    ids=["small", "large", "flat"],
)
def test_s09_narrow_and_wide_have_the_same_bits(tile, width, parts, out_dtype, rng):
    """The wide kernel walks the slices, or leaves each to a block and their sums to be added."""
    x, weight = given(9, 17, width, rng)
    assert order_of(17, width).slices >= parts
    expected = run(x, weight, out_dtype)
    out = run(x, weight, out_dtype, Way(tile, 0, parts))
    assert out.tobytes() == expected.tobytes()


def test_s09_groups_of_slices_have_the_same_bits(rng):
    x, weight = given(3, 9, 4096, rng)
    assert order_of(9, 4096) == Order(groups=4, slices=4, units=1)
    assert order_of(9, 7168).slices == 7 and way_of(73, 9, 7168).parts == 4, "groups, not slices"
    assert run(x[1:2], weight, F32).tobytes() == run(x, weight, F32)[1:2].tobytes()


def test_the_order_is_a_function_of_the_weights_shape():
    """K2.6 at TP = 8; a change here changes the bits of every model."""
    orders = {name: tuple(order_of(case["N"], case["K"])) for name, case in PUBLISHED.items()}
    assert orders == dict(
        k26=(1, 14, 2),
        k26_q_b=(1, 6, 1),
        k26_o=(1, 4, 1),
        k26_dense_gate_up=(1, 7, 4),
        k26_dense_down=(1, 3, 3),
        k26_shared_gate_up=(4, 7, 1),
        k26_shared_down=(1, 1, 1),
        k26_logits=(1, 7, 4),
        k26_draft_fc=(1, 7, 24),
    )
    for rows in (1, 16, 192, 1024, 1025, 7168, 163840):
        for width in (8, 256, 264, 2816, 4096, 7168, 18432):
            order = order_of(rows, width)
            assert order.width >= width and order.slices <= 16


def test_m01_a_nan_row_stays_by_itself(rng):
    x, weight = given(10, 24, 192, rng)
    for way in (None, WIDE):
        clean = run(x, weight, way=way)
        broken = x.copy()
        broken[3] = np.nan
        out = run(broken, weight, way=way)
        assert np.isnan(out[3].astype(F32)).all()
        assert np.delete(out, 3, 0).tobytes() == np.delete(clean, 3, 0).tobytes()


def test_rows_may_lie_apart(rng):
    wide = np.full((5, 272), np.nan, BF16)
    x, weight = given(5, 24, 256, rng)
    wide[:, 8:264] = x
    assert run(wide[:, 8:264], weight).tobytes() == run(x, weight).tobytes()


def test_the_weight_does_not_wait_for_the_kernel_ahead(tmp_path):
    """In the machine code: the assembler moves non-coherent loads behind the wait."""
    narrow, wide = linear_narrow.make(4, 2, 1, bf16, True), linear_wide.make(LARGE, bf16, True)
    for kernel, load, count in ((narrow, "LDG", 16), (wide, "LDGSTS", 12)):
        assert before_the_wait(kernel, tmp_path).count(f"{load}.E") == count


def test_what_does_not_fit_is_named():
    x, weight, out = np.zeros((2, 16), BF16), np.zeros((3, 16), BF16), np.zeros((2, 3), BF16)
    with pytest.raises(ValueError, match=r"weight \(3, 16\) does not fit rows of \(2, 8\)"):
        linear(x[:, :8], weight, out=out)
    with pytest.raises(ValueError, match="x: dtype float32, expected bfloat16"):
        linear(x.astype(F32), weight, out=out)
    with pytest.raises(ValueError, match="weight: dtype float32, expected bfloat16"):
        linear(x, weight.astype(F32), out=out)
    with pytest.raises(ValueError, match="out: dtype bfloat16, expected float32"):
        linear(x, weight, F32, out=out)
    with pytest.raises(ValueError, match=r"out: shape \(1, 3\), expected \(2, 3\)"):
        linear(x, weight, out=out[:1])
    odd = np.zeros((2, 7), BF16)
    with pytest.raises(ValueError, match="x: rows of 7, 7 apart, expected multiples of 8"):
        linear(odd, np.zeros((3, 7), BF16), out=out)
    x, weight, out = np.zeros((2, 4096), BF16), np.zeros((3, 4096), BF16), np.zeros((2, 3), BF16)
    assert workspace_floats(2, 3, 4096) == 24 and workspace_floats(2, 2048, 4096) == 0
    for workspace in (None, np.empty(23, F32)):
        with pytest.raises(ValueError, match="workspace: 2 rows need 24 float32"):
            linear(x, weight, out=out, workspace=workspace)
    with pytest.raises(ValueError, match="workspace: dtype bfloat16, expected float32"):
        linear(x, weight, out=out, workspace=np.empty(24, BF16))


def test_instances_are_what_the_published_shapes_take(monkeypatch):
    """By any number of rows: a way changes behind a multiple of 8."""
    names = set()
    monkeypatch.setattr(Kernel, "launch", lambda self, *_, **__: names.add(self.name))
    cases = [(shape, BF16) for shape in SHAPES + TINY] + [(shape, F32) for shape in LOGITS]
    for (outs, width), out_dtype in cases:
        weight = np.empty((outs, width), BF16)
        for rows in range(1, 4097, 8):
            out, x = np.empty((rows, outs), out_dtype), np.empty((rows, width), BF16)
            workspace = np.empty(workspace_floats(rows, outs, width), F32)
            linear(x, weight, out=out, workspace=workspace)
    assert {kernel.name for kernel in instances()} == names


def on_gpu(x, weight, out_dtype):
    outs, width = weight.shape
    workspace = to_gpu(np.full(max(workspace_floats(len(x), outs, width), 1), np.nan, F32))
    out = to_gpu(np.empty((len(x), outs), out_dtype))
    return to_host(linear(to_gpu(x), weight, out=out, workspace=workspace))


def repeated(shape, rng, scale=1.0):
    """Normal numbers that come round again after a prime, quicker to make than a large weight."""
    some = (rng.standard_normal(1_000_003) * scale).astype(BF16)
    return np.resize(some, shape)


def difficult(rows, width, rng):
    """Rows of extreme scale, of zeros, of terms that cancel; the rest ordinary."""
    x = repeated((rows, width), rng)
    x[1] *= BF16.type(1e20)
    x[2] *= BF16.type(1e-20)
    x[3] = BF16.type(0)
    x[4, ::2], x[4, 1::2] = BF16.type(1e4), BF16.type(-1e4)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "k26_draft_fc"])
def test_gpu_agrees_with_float64_and_a_row_with_itself_alone(name, rng):
    """Error bound: a rounding to bfloat16, and 2^-16 of the sum of absolute products."""
    outs, width = PUBLISHED[name]["N"], PUBLISHED[name]["K"]
    out_dtype = PUBLISHED[name].get("out_dtype", BF16)
    x, weight = difficult(257, width, rng), repeated((outs, width), rng, width**-0.5)
    device = to_gpu(weight)
    together = on_gpu(x, device, out_dtype)
    some = rng.choice(outs, 64)
    wide_x, wide_weight = x.astype(np.float64), weight[some].astype(np.float64)
    exact, size = wide_x @ wide_weight.T, abs(wide_x) @ abs(wide_weight).T
    step = 2**-8 if out_dtype == BF16 else 0
    error = abs(together[:, some].astype(np.float64) - exact)
    assert (error <= step * abs(exact) + 2**-16 * size + 1e-38).all()
    order = rng.permutation(257)
    for rows in (1, 2, 8, 9, 16, 17, 24, 25, 33, 40, 41, 64, 65, 72, 73, 129, 257):
        picked = order[-rows:]
        assert on_gpu(x[picked], device, out_dtype).tobytes() == together[picked].tobytes(), rows
    for i in range(5):
        assert on_gpu(x[i : i + 1], device, out_dtype).tobytes() == together[i].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("outs, width", [(176, 192), (96, 512), (24, 4096), (21, 264), (16, 1536)])
def test_gpu_small_agrees_with_the_specification_at_every_width_of_the_kernels(outs, width, rng):
    """Small enough for racecheck and memcheck: both kernels, groups, what lies beyond K."""
    x, weight = given(129, outs, width, rng)
    expected, device = spec.linear(x, weight), to_gpu(weight)
    together = on_gpu(x, device, BF16)
    np.testing.assert_allclose(together.astype(F32), expected.astype(F32), **spec.TOLERANCE)
    for rows in (1, 9, 17, 25, 33, 41, 65):
        assert on_gpu(x[:rows], device, BF16).tobytes() == together[:rows].tobytes()


@pytest.mark.gpu
def test_gpu_small_has_the_same_bits_in_every_tile(rng):
    x, weight = map(to_gpu, given(129, 96, 512, rng))
    expected = on_gpu(x[:9], weight, BF16)
    for tile in (LARGE, FLAT, SMALL):
        out = to_gpu(np.empty((129, 96), BF16))
        wide = to_host(linear(x, weight, out=out, way=Way(tile, 0, 1)))
        assert wide[:9].tobytes() == expected.tobytes()
