"""The bench harness without a GPU: what it checks, what it counts, what it keeps out of cache."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from bench import harness
from bench.cases import Case, cases
from bench.device import Cpu
from bench.timing import MOST, PASSED_L2, Clock, Plan, arrays, launches, mapped, plan
from ddtree_numba.kernels.swiglu import swiglu
from ddtree_numba.spec import rms_norm as rms_norm_spec
from ddtree_numba.spec import tree_build as tree_build_spec
from ddtree_numba.spec.numerics import BF16
from ddtree_numba.spec.tree_build import Tree
from tests.toy_bench import CASE, L2, SPEC, FakeBenchmark, FakeGpu, double


@pytest.fixture
def gpu():
    return FakeGpu()


def measure(device, kernel, case=CASE, enabled=True, **options):
    clock = Clock()
    benchmark = FakeBenchmark(clock)
    benchmark.enabled = enabled
    return harness.measure(case, kernel, device=device, benchmark=benchmark, clock=clock, **options)


def test_a_row_has_the_time_of_one_launch(gpu):
    row = measure(gpu, gpu.kernel)
    assert row["time_us"] == pytest.approx(2.0) and row["rounds"] >= 30
    assert (row["op"], row["case"], row["bytes"], row["flops"]) == ("double", "k26", 400, 100)
    assert row["launches"] == len(gpu.used) >= 16


def test_every_launch_finds_its_arrays_out_of_cache(gpu):
    """Between two uses of an array, twice the L2 cache of others has been touched."""
    row = measure(gpu, gpu.kernel)
    for argument in zip(*gpu.used, strict=True):
        order = [array.ctypes.data for array in argument]
        for i, address in enumerate(order):
            if address in order[i + 1 :]:
                between = order[i + 1 :].index(address)
                assert between * row["bytes"] >= 2 * L2


def test_a_wrong_kernel_fails_before_it_is_timed(gpu):
    def wrong(x, table, *, out, stream=None):
        gpu.kernel(x, table, out=out)[7] += 1

    with pytest.raises(AssertionError, match=r"result 0: 1 of 50 differ, first at \[7\]"):
        measure(gpu, wrong)
    assert len(gpu.used) == 1


def test_an_output_that_nobody_writes_is_seen(gpu):
    with pytest.raises(AssertionError, match="50 of 50 differ"):
        measure(gpu, lambda x, table, *, out, stream=None: out)


def test_without_benchmarking_a_case_is_checked_and_not_timed(gpu):
    assert measure(gpu, gpu.kernel, enabled=False) is None
    with pytest.raises(AssertionError):
        measure(gpu, lambda x, table, *, out, stream=None: out, enabled=False)


def test_a_small_case_runs_once_on_the_executor():
    calls = []

    def kernel(x, table, *, out, stream=None):
        calls.append(stream)
        out[...] = double(x, table)

    assert measure(Cpu(), kernel, Case(SPEC, "small", dict(T=3), on_gpu=False)) is None
    assert calls == [None]


def test_varied_inputs_share_what_they_pass_on(gpu):
    def vary(given, rng):
        return given | dict(x=rng.standard_normal(50).astype(np.float32))

    measure(gpu, gpu.kernel, vary=vary)
    xs, tables, outs = (
        {id(array) for array in argument} for argument in zip(*gpu.used, strict=True)
    )
    assert len(tables) == 1 and len(xs) == len(outs) > 1
    assert len({x.tobytes() for x, _, _ in gpu.used}) == len(xs)


def test_an_operation_in_place_is_compared_by_what_it_changed(gpu):
    spec = SimpleNamespace(**vars(SPEC) | dict(double=lambda x, table: x.__imul__(2)))
    case = Case(spec, "k26", dict(T=50), on_gpu=True)

    def kernel(x, table, *, stream=None):
        gpu.used.append(x)
        x *= 2

    with np.errstate(over="ignore"):  # the same copy again and again
        assert measure(gpu, kernel, case, updates=("x",))["time_us"] == pytest.approx(2.0)
    with pytest.raises(AssertionError, match="50 of 50"):
        measure(gpu, lambda x, table, *, stream=None: None, case, updates=("x",))


def test_a_kernel_may_take_more_than_its_specification(gpu):
    def kernel(x, table, workspace, *, out, stream=None):
        assert workspace.shape == x.shape
        gpu.kernel(x, table, out=out)

    assert measure(gpu, kernel, more=lambda given: dict(workspace=np.empty_like(given["x"])))


def test_the_kernels_of_a_call_are_noted(gpu):
    from ddtree_numba.spec import swiglu as spec

    case = Case(spec, "small", dict(T=2, I=16), on_gpu=True)
    gpu.capture = lambda work: lambda: None  # one launch on the executor is enough
    gpu.seconds = lambda replay: 1e-6
    (used,) = measure(gpu, swiglu, case)["kernels"]
    assert used["name"] == "swiglu_16_bf16" and used["grid"] == [1] and used["threads"] == 128
    assert 0 < used["registers"] <= 255 and used["spill_bytes"] == 0


def test_launches_are_recorded_inside_only():
    x, out = np.zeros((2, 32), BF16), np.zeros((2, 16), BF16)
    with pytest.raises(ZeroDivisionError), launches() as seen:
        swiglu(x, out=out)
        raise ZeroDivisionError
    swiglu(x, out=out)
    ((kernel, grid, arguments),) = seen
    assert (kernel.name, grid) == ("swiglu_16_bf16", 1)
    assert arguments[0] is x and arguments[1] is out


@pytest.mark.parametrize("touched", [0, 1, 40, 1_000, 57_344, 3_000_000, 235_000_000])
@pytest.mark.parametrize("footprint", [1, 10_000, 3 << 30, 40 << 30])
def test_a_plan_keeps_every_launch_cold(touched, footprint):
    l2 = 60 << 20
    made = plan(touched, footprint, l2)
    assert 2 <= made.copies <= made.launches <= MOST
    if made.launches > made.copies:  # copies come round again
        assert (made.copies - 1) * touched >= PASSED_L2 * l2
    assert made.copies == 2 or made.copies * footprint <= 16 << 30


def test_large_calls_take_few_copies_and_small_ones_many():
    assert plan(235_000_000, 235_000_000, 60 << 20) == Plan(2, 16)
    assert plan(57_344, 57_344, 60 << 20) == Plan(MOST, MOST)
    assert plan(1_000_000, 1_000_000, 60 << 20) == Plan(127, 1007)


def test_shares_are_of_the_higher_floor():
    roofs = dict(copy=4e12, mma=800e12)
    row = dict(time_us=10.0, bytes=20_000_000, flops=1_000_000)
    found = harness.against(row, roofs)
    assert found["share"] == pytest.approx(0.5) and found["bound"] == "memory"
    assert found["gb_per_s"] == pytest.approx(2000) and found["floor_us"] == pytest.approx(5)
    found = harness.against(row | dict(flops=6_000_000_000), roofs)
    assert found["share"] == pytest.approx(0.75) and found["bound"] == "compute"
    assert found["tflop_per_s"] == pytest.approx(600)
    found = harness.against(row | dict(flops=6_000_000_000), roofs | dict(mma=None))
    assert found["share"] == pytest.approx(0.5)


def test_equal_means_bytes_unless_there_is_a_tolerance():
    one, zero, nan = (np.array([x], np.float32) for x in (1, 0.0, np.nan))
    harness.require_equal((one, nan), (one.copy(), nan.copy()), 0)
    harness.require_equal(one.astype(BF16), (one + 2**-7).astype(BF16), dict(rtol=2**-7, atol=0))
    with pytest.raises(AssertionError, match="sign of a zero"):
        harness.require_equal(zero, -zero, 0)
    with pytest.raises(AssertionError, match="result 1"):
        harness.require_equal((one, one + 2), (one, one), dict(rtol=0.1, atol=0))
    with pytest.raises(AssertionError):
        harness.require_equal(one, nan, dict(rtol=0.1, atol=0))
    with pytest.raises(AssertionError, match="result 0"):
        harness.require_equal(one, one.astype(np.float64), 0)


def test_arrays_are_found_in_whatever_holds_them():
    tree = Tree(*(np.full(3, i) for i in range(5)))
    value = dict(tree=tree, pair=(tree.sizes, [np.float32(2), None]), budget=4, kind=np.float32)
    assert [array[0] for array in arrays(value)] == [0, 1, 2, 3, 4, 4]
    moved = mapped(lambda array: array + 10, value)
    assert isinstance(moved["tree"], Tree) and moved["tree"].scores[0] == 13
    assert moved["pair"][0][0] == 14 and moved["pair"][1] == [2, None] and moved["budget"] == 4
    assert moved["kind"] is np.float32, "a type of numbers is no array"


def test_cases_are_published_sizes_with_rows_and_one_small_case():
    found = cases(rms_norm_spec, rows=(1, 65), smoke="latent")
    names = {one.id: one.values[0] for one in found}
    assert list(names)[:3] == ["smoke-latent", "k26-T1", "k26-T65"] and len(names) == 7
    assert names["k26-T65"].dims == rms_norm_spec.CASES["k26"] | dict(T=65)
    assert [bool(one.marks) for one in found] == [case.on_gpu for case in names.values()]
    assert not names["smoke-latent"].on_gpu and names["k26-T1"].op == "rms_norm"
    (small, whole) = cases(tree_build_spec)  # nothing called T
    assert (small.id, whole.id) == ("smoke-no_budget", "k26")
    (_, own) = cases(tree_build_spec, {"one": dict(requests=1)})
    assert own.values[0].dims == dict(requests=1)
