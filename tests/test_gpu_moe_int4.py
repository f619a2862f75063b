"""The expert kernels on a GPU: against the specification and float64, the law, graphs.

Those named small run within seconds under compute-sanitizer; the others are K2.6's sizes.
"""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import moe_int4 as kernels
from ddtree_numba.kernels.moe_int4 import moe_int4, workspace
from ddtree_numba.spec import moe_int4 as spec
from ddtree_numba.spec.numerics import BF16, F32, Int4Matrix, bf16
from tests.expert_records import on_device, part, run
from tests.gpu_arrays import to_gpu, to_host

pytestmark = pytest.mark.gpu
MATRICES = ("gate_up", "down")
SMALL = {
    "k26_rows": dict(T=20, k=2, E=6, H=1024, I=256, base=True),
    "half_the_ranks": dict(T=20, k=2, E=3, H=128, I=1024),
    "embedded": dict(T=13, k=4, E=12, H=192, I=256, base=True),
    "embedded_eighth": dict(T=13, k=4, E=12, H=192, I=32),
}


def placed(given):
    """Everything on the GPU, experts as records."""
    import cupy

    matrices = {
        name: Int4Matrix(*to_gpu((given[name].packed, given[name].scale)), given[name].shape)
        for name in MATRICES
    }
    rows = {name: value for name, value in given.items() if name not in MATRICES}
    return on_device(to_gpu(rows) | matrices, cupy.zeros)


@pytest.mark.parametrize(
    "direct, busy", [(1000, 8), (0, 1000), (0, 0)], ids=["direct", "narrow", "wide"]
)
@pytest.mark.parametrize("name", SMALL)
def test_gpu_small_agrees_with_the_specification(name, direct, busy, rng, monkeypatch):
    import cupy

    given = spec.inputs(SMALL[name], rng)
    monkeypatch.setattr(kernels, "DIRECT", direct)
    monkeypatch.setattr(kernels, "BUSY", busy)
    found = to_host(run(**placed(given), allocate=cupy.empty)).astype(F32)
    np.testing.assert_allclose(found, spec.moe_int4(**given).astype(F32), **spec.TOLERANCE)


@pytest.fixture(scope="module")
def layer():
    """K2.6's experts of one of eight ranks: eight that differ, as published, repeated to 384 as
    records on the GPU. One has scales of 0, one small scales, one nibbles of -8."""
    given = spec.inputs(spec.CASES["k26"] | dict(T=1, E=8), np.random.default_rng(1))
    small = {name: given[name] for name in MATRICES}
    all_of_them = {}
    for name, matrix in small.items():
        matrix.scale[1, ::7] = 0
        matrix.scale[2] *= BF16.type(2.0**-20)
        matrix.packed[3, ::5] = 0
        words, scale = (np.resize(a, (384, *a.shape[1:])) for a in (matrix.packed, matrix.scale))
        all_of_them[name] = Int4Matrix(words, scale, matrix.shape)
    records = placed(all_of_them)
    float64 = {n: [m.dense(e).astype(float) for e in range(8)] for n, m in small.items()}
    return SimpleNamespace(small=small, records=records, float64=float64)


def tokens(rows, rng, skew=0.0):
    """Routing by popularity exp(skew * normal): 0 is uniform, 4 sends most tokens to a few."""
    keys = skew * rng.standard_normal(384) + rng.gumbel(size=(rows, 384))
    return dict(
        x=rng.standard_normal((rows, 7168), F32).astype(BF16),
        experts=(-keys).argsort(1)[:, :8].astype(np.int32),
        weights=rng.uniform(0.05, 0.6, (rows, 8)).astype(F32),
        base=rng.standard_normal((rows, 7168), F32).astype(BF16),
    )


def on_gpu(layer, rows):
    import cupy

    return to_host(run(**to_gpu(rows), **layer.records, allocate=cupy.empty))


@pytest.mark.parametrize("rows", [1, 9, 65, 1024])
def test_gpu_agrees_with_the_specification_and_with_float64(layer, rows, rng):
    """A row's error relative to float64, h rounded, is below a step of bfloat16."""
    given = tokens(rows, rng)
    some = sorted({0, rows - 1})
    found = on_gpu(layer, given)[some].astype(F32)
    cut = part(given, some) | layer.small
    cut["experts"] = cut["experts"] % 8  # experts repeat
    np.testing.assert_allclose(found, spec.moe_int4(**cut).astype(F32), **spec.TOLERANCE)
    for row, out in enumerate(found):
        x, total = cut["x"][row].astype(float), cut["base"][row].astype(float)
        for expert, share in zip(cut["experts"][row], cut["weights"][row], strict=True):
            gate, up = np.split(layer.float64["gate_up"][expert] @ x, 2)
            hidden = bf16(gate / (1 + np.exp(-gate)) * up).astype(float)
            total += float(share) * (layer.float64["down"][expert] @ hidden)
        error = np.linalg.norm(out - total) / np.linalg.norm(total)
        assert error < 2**-8, error


@pytest.mark.parametrize("skew", [0.0, 4.0])
def test_gpu_e08_a_row_has_the_same_bits_in_any_company(layer, skew, rng):
    """Alone, among 2, 9, 17, 65, 129 and 1,024 rows, shuffled."""
    given = tokens(1024, rng, skew)
    together = on_gpu(layer, given)
    for rows in (2, 9, 17, 65, 129):
        assert on_gpu(layer, part(given, slice(rows))).tobytes() == together[:rows].tobytes()
    order = rng.permutation(1024)
    assert on_gpu(layer, part(given, order)).tobytes() == together[order].tobytes()
    for row in [0, 1, 8, 16, 64, 128, 1023, *rng.integers(1024, size=9)]:
        alone = on_gpu(layer, part(given, slice(row, row + 1)))
        assert alone.tobytes() == together[row : row + 1].tobytes()


def test_gpu_e08_extreme_loads_run_within_one_graph(layer, rng):
    """4,096 rows: uniform, all to the same experts, nearly all padding; captured once."""
    import cupy

    given = tokens(64, rng)
    given = {name: np.resize(value, (4096, *value.shape[1:])) for name, value in given.items()}
    device = to_gpu(given)
    space = workspace(4096, 8, layer.records["down"], cupy.empty)
    out = cupy.empty((4096, 7168), BF16)
    stream = cupy.cuda.Stream(non_blocking=True)

    def block():
        moe_int4(**device, **layer.records, workspace=space, out=out, stream=stream)

    cupy.cuda.Device().synchronize()
    with stream:
        block()
        stream.begin_capture()
        block()
        graph = stream.end_capture()
    same = np.tile(np.arange(8, dtype=np.int32), (4096, 1))
    padded = given["experts"].copy()
    padded[5:] = -1
    for experts in (given["experts"], same, padded):
        device["experts"].set(experts)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        found = to_host(out)
        for rows in (slice(0, 3), slice(4093, 4096)):
            alone = on_gpu(layer, part(given | {"experts": experts}, rows))
            assert alone.tobytes() == found[rows].tobytes()
