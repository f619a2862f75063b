"""The expert kernels on a GPU at K2.6's sizes: against the specification, the law, graphs."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.moe_int4 import moe_int4, workspace
from ddtree_numba.spec import moe_int4 as spec
from ddtree_numba.spec.numerics import BF16, F32, Int4Matrix, bf16
from tests.expert_records import on_device, part, run
from tests.gpu_arrays import to_gpu, to_host


@pytest.fixture(scope="module")
def layer():
    """K2.6's experts of one of eight ranks, as published and as records on the GPU: 1.2 GB each."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(1)
    given = spec.inputs(spec.CASES["k26"] | dict(T=1, E=8), rng)
    for name in ("gate_up", "down"):
        matrix = given[name]
        matrix.scale[1, ::7] = 0
        matrix.scale[2] *= BF16.type(2.0**-20)
        matrix.packed[3, ::5] = 0  # nibbles of -8
        words, scale = (np.resize(a, (384, *a.shape[1:])) for a in (matrix.packed, matrix.scale))
        given[name] = Int4Matrix(words, scale, matrix.shape)
    return given, on_device(to_gpu_matrices(given), cupy.zeros)


def to_gpu_matrices(given):
    return given | {
        name: Int4Matrix(*to_gpu((given[name].packed, given[name].scale)), given[name].shape)
        for name in ("gate_up", "down")
    }


def tokens(rows, rng, skew=0.0):
    """Routing by popularity exp(skew * normal): 0 is uniform, 4 sends most tokens to a few."""
    keys = skew * rng.standard_normal(384) + rng.gumbel(size=(rows, 384))
    return dict(
        x=rng.standard_normal((rows, 7168)).astype(BF16),
        experts=(-keys).argsort(1)[:, :8].astype(np.int32),
        weights=rng.uniform(0.05, 0.6, (rows, 8)).astype(F32),
        base=rng.standard_normal((rows, 7168)).astype(BF16),
    )


def run_on_gpu(layer, rows_of):
    cupy = pytest.importorskip("cupy")
    both = {name: layer[1][name] for name in ("gate_up", "down")}
    return to_host(run(**to_gpu(rows_of), **both, allocate=cupy.empty))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 9, 65, 300])
def test_gpu_agrees_with_the_specification_and_with_float64(layer, rows, rng):
    """A row's error relative to float64, h rounded, is below a step of bfloat16."""
    given = tokens(rows, rng)
    out = run_on_gpu(layer, given)
    some = sorted({0, rows // 2, rows - 1})
    small = {
        name: Int4Matrix(matrix.packed[:8], matrix.scale[:8], matrix.shape)
        for name, matrix in layer[0].items()
        if name in ("gate_up", "down")
    }
    cut = part(given, some) | small
    cut["experts"] = cut["experts"] % 8  # experts repeat
    expected = spec.moe_int4(**cut).astype(F32)
    found = out[some].astype(F32)
    np.testing.assert_allclose(found, expected, **spec.TOLERANCE)
    for row, given_row in enumerate(some):
        total = given["base"][given_row].astype(float)
        for e, share in zip(cut["experts"][row], cut["weights"][row], strict=True):
            gate_up, down = (small[name].dense(int(e)).astype(float) for name in small)
            gate, up = np.split(gate_up @ cut["x"][row].astype(float), 2)
            hidden = bf16(gate / (1 + np.exp(-gate)) * up).astype(float)
            total = total + float(share) * (down @ hidden)
        error = np.linalg.norm(found[row] - total) / np.linalg.norm(total)
        assert error < 2**-8, error


@pytest.mark.gpu
@pytest.mark.parametrize("skew", [0.0, 2.0, 6.0])
def test_gpu_e08_a_row_has_the_same_bits_in_any_company(layer, skew, rng):
    """Alone, among 2, 9, 17, 65, 129 and 1,024 rows, shuffled."""
    given = tokens(1024, rng, skew)
    together = run_on_gpu(layer, given)
    for rows in (2, 9, 17, 65, 129):
        assert run_on_gpu(layer, part(given, slice(rows))).tobytes() == together[:rows].tobytes()
    order = rng.permutation(1024)
    assert run_on_gpu(layer, part(given, order)).tobytes() == together[order].tobytes()
    for row in [0, 1, 8, 16, 64, 128, 1023, *rng.integers(1024, size=9)]:
        alone = run_on_gpu(layer, part(given, slice(row, row + 1)))
        assert alone.tobytes() == together[row : row + 1].tobytes()


@pytest.mark.gpu
def test_gpu_e08_extreme_loads_run_within_one_graph(layer, rng):
    """All on one expert, padding, 4,096 rows; captured once, replayed with other routing."""
    import cupy

    both = {name: layer[1][name] for name in ("gate_up", "down")}
    given = tokens(4096, rng)
    device = to_gpu(given)
    space = workspace(4096, 8, *both.values(), cupy.empty)
    out = cupy.empty((4096, 7168), BF16)
    stream = cupy.cuda.Stream(non_blocking=True)

    def block():
        moe_int4(**device, **both, workspace=space, out=out, stream=stream)

    with stream:
        block()
        stream.begin_capture()
        block()
        graph = stream.end_capture()
    one = np.tile(np.arange(8, dtype=np.int32), (4096, 1))
    padded = given["experts"].copy()
    padded[5:] = -1
    for experts in (given["experts"], one, padded):
        device["experts"].set(experts)
        graph.launch(stream)
        stream.synchronize()
        found = to_host(out)
        for rows in (slice(0, 3), slice(4093, 4096)):
            alone = run_on_gpu(layer, part(given | {"experts": experts}, rows))
            assert alone.tobytes() == found[rows].tobytes()
