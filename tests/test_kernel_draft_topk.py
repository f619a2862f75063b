"""The draft kernels: the specification's ids and log-probabilities, hard orders, shards."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, int32, int64

from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.draft_topk import (
    PRODUCT,
    Shape,
    draft_maxima,
    draft_merge,
    draft_shard,
    draft_topk,
    workspace_words,
)
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.thinning import bound_of
from ddtree_numba.spec import draft_topk as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CPU = [name for name in spec.CASES if not name.startswith("k26")]
SMALL = Shape(threads=64, kept=64)  # less for the executor to do, and more blocks


def buffers(logits, k, empty=np.empty):
    shape = (*logits.shape[:2], min(k, logits.shape[2]))
    return empty(shape, np.int32), empty(shape, np.float32)


def on_kernel(logits, k, shape=SMALL):
    rows, width = logits.shape[0] * logits.shape[1], logits.shape[2]
    workspace = np.zeros(workspace_words(rows, width, shape), np.int64)
    out = buffers(logits, k)
    assert draft_topk(logits, k, workspace=workspace, out=out, shape=shape) is out
    assert not workspace[: rows * 5].any(), "left as it was"
    return out


def assert_same(found, expected):
    """Equal bits; every NaN is as good as another."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_equals_the_specification(name, dtype, rng):
    case = spec.CASES[name] | dict(depths=min(spec.CASES[name]["depths"], 2))
    given = spec.inputs(case, rng)
    given["logits"] = given["logits"].astype(dtype)
    assert_same(on_kernel(**given), spec.draft_topk(**given))


def test_the_product_s_blocks_find_the_same(rng):
    """1,024 tokens a block, and 4,096 of large vocabularies; the last has a few."""
    logits = (rng.standard_normal((1, 1, 8202)) * 4).astype(F32)
    for shape in (PRODUCT, Shape(each=16)):
        assert_same(on_kernel(logits, 33, shape), spec.draft_topk(logits, 33))


@pytest.mark.parametrize("k", [1, 5, 64])
@pytest.mark.parametrize("order", ["equal", "ascending", "descending", "one_thread"])
def test_s07_orders_that_leave_all_great_keys_to_few_threads(order, k):
    """The bound of the threads' maxima is then too low, and all keys are counted."""
    row = np.zeros(2500, F32)
    if order == "one_thread":
        row.reshape(-1, 4)[::64] = np.arange(40, dtype=F32).reshape(-1, 4) // 3
    elif order != "equal":
        row = np.arange(2500, dtype=F32) // 3
    logits = (row[::-1] if order == "descending" else row)[None, None].copy()
    assert_same(on_kernel(logits, k), spec.draft_topk(logits, k))


def test_more_keys_than_a_list_holds(rng):
    """The last block then goes through the row: what is left of one part goes on to the next."""
    shape = Shape(threads=32, each=16, kept=32)
    logits = rng.standard_normal((1, 1, 3_000)).astype(F32)
    for order in (logits, np.sort(logits)):
        assert_same(on_kernel(order, 30, shape), spec.draft_topk(order, 30))


def test_more_keys_than_are_kept_though_no_list_is_full(rng):
    shape = Shape(threads=32, each=4, kept=32)
    logits = rng.standard_normal((1, 1, 4096)).astype(F32)
    logits.reshape(-1, 4)[rng.permutation(1024)[:20]] += 20
    assert_same(on_kernel(logits, 16, shape), spec.draft_topk(logits, 16))


@pytest.mark.parametrize("count, k", [(1, 1), (31, 8), (40, 64), (256, 16), (300, 64), (1000, 33)])
def test_the_bound_is_reached_by_k_groups_and_few_more(count, k, rng):
    @cuda.jit
    def find(maxima: read(int64), bound: write(int64), count: int32, k: int32):
        found = bound_of(maxima, 0, count, k)
        if cuda.threadIdx.x == 0:
            bound[0] = found

    bound = np.zeros(1, np.int64)
    for low in (0, 2**31):
        maxima = rng.integers(low, 2**32 - 2**23, count)
        Kernel(find, threads=32).launch(1, maxima, bound, count, k)
        groups = [maxima[i::256].max() for i in range(min(count, 256))]
        reached = sum(group >= bound[0] for group in groups)
        assert bound[0] == 0 if len(groups) < k else k <= reached <= k + k // 8
    maxima[:] = 3 * 2**30
    Kernel(find, threads=32).launch(1, maxima, bound, count, k)
    assert (bound[0] > 0) == (min(count, 256) >= k) and bound[0] <= 3 * 2**30


@pytest.mark.parametrize("values", [[np.nan, 1, -np.inf, 1], [-0.0, 0.0, -1, 0.0], [3e38, -3e38]])
def test_s12_special_values(values):
    logits = np.float32([[values]])
    assert_same(on_kernel(logits, 4), spec.draft_topk(logits, 4))


@pytest.mark.parametrize("bad", [[np.nan] * 4, [-np.inf] * 4, [1, np.inf, 2, 3]])
def test_s12_a_row_without_a_finite_maximum_proposes_nothing(bad):
    logits = np.float32([[bad, [1, 2, 3, 4]]])
    found = on_kernel(logits, 2)
    assert_same(found, spec.draft_topk(logits, 2))
    assert np.isnan(found[1][0, 0]).all() and np.isfinite(found[1][0, 1]).all()


def test_a_row_does_not_depend_on_its_company(rng):
    logits = (rng.standard_normal((3, 2, 1101)) * 4).astype(F32)
    together = on_kernel(logits, 9)
    for r, depth in np.ndindex(3, 2):
        alone = on_kernel(np.ascontiguousarray(logits[r : r + 1, depth : depth + 1]), 9)
        for one, among in zip(alone, together, strict=True):
            assert one.tobytes() == among[r, depth].tobytes()


def in_shards(logits, k, shards, shape, zeros=np.zeros, put=np.asarray):
    """What a rank does with its shard; gathering is stacking."""
    rows, width = logits.shape[0] * logits.shape[1], logits.shape[2] // shards
    parts = [put(np.ascontiguousarray(part)) for part in np.split(logits, shards, axis=2)]
    words = workspace_words(rows, width, shape)
    spaces = [zeros(words, np.int64) for _ in parts]
    tops, records = zeros((shards, rows), np.int64), zeros((shards, rows, k + 1), np.int64)
    records[...] = 2**51  # stale
    for s, part in enumerate(parts):
        tops[s] = draft_maxima(part, k, s * width, workspace=spaces[s], shape=shape)
    for s, part in enumerate(parts):
        draft_shard(part, k, tops, workspace=spaces[s], out=records[s], shape=shape)
        assert not spaces[s][: rows * 5].any()
    out = tuple(put(each) for each in buffers(logits, k))
    return draft_merge(records, tops, out=out)


@pytest.mark.parametrize("shards, vocabulary, k", [(2, 600, 7), (8, 128, 12), (8, 8, 8)])
def test_shards_give_what_one_row_gives(shards, vocabulary, k, rng):
    """Ties across shards go to the lower global id; sums are exact in any grouping."""
    logits = (rng.standard_normal((1, 2, vocabulary)) * 4).astype(F32).round(1)
    logits[0, 0, 3] = np.nan
    assert_same(in_shards(logits, k, shards, SMALL), spec.draft_topk(logits, k))


def test_a_shard_without_a_finite_logit(rng):
    logits = rng.standard_normal((1, 1, 64)).astype(F32)
    logits[..., :32] = -np.inf
    logits[..., 32:40] = np.nan
    assert_same(in_shards(logits, 5, 2, SMALL), spec.draft_topk(logits, 5))


def test_shapes_and_values_that_do_not_fit_are_named():
    logits = np.zeros((1, 2, 16), F32)
    good = dict(
        logits=logits,
        k=4,
        workspace=np.zeros(workspace_words(2, 16), np.int64),
        out=buffers(logits, 4),
    )
    draft_topk(**good)
    for change, message in (
        (dict(out=buffers(logits, 5)), r"token_ids: shape \(1, 2, 5\), expected \(1, 2, 4\)"),
        (dict(k=-1), r"k: -1, expected 0 \.\. 64"),
        (dict(logits=logits.astype(np.float64)), "logits: dtype float64"),
        (dict(workspace=good["workspace"][:-1]), "workspace: shape"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            draft_topk(**good | change)
    wide = np.zeros((1, 1, 80), F32)
    with pytest.raises(ValueError, match=r"^k: 65, expected 0 \.\. 64"):
        draft_topk(wide, 65, workspace=good["workspace"], out=buffers(wide, 65))
    with pytest.raises(ValueError, match="^first_id"):
        draft_maxima(logits, 4, 2**20, workspace=good["workspace"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "k, dtype, requests", [(1, F32, 1), (32, F32, 8), (64, F32, 1), (64, BF16, 1)]
)
def test_gpu_equals_the_specification(k, dtype, requests, rng):
    import cupy

    given = spec.inputs(spec.CASES["k26"] | dict(k=k, requests=requests), rng)
    logits = given["logits"].astype(dtype)
    logits[0, 1] = np.sort(logits[0, 1])
    logits[0, 2] = 0
    logits[0, 3] = (rng.standard_normal(logits.shape[2]) * 4).astype(dtype)
    expected = spec.draft_topk(logits, k)
    rows = requests * logits.shape[1]
    workspace = cupy.zeros(workspace_words(rows, logits.shape[2]), np.int64)
    device, out = cupy.asarray(logits), to_gpu(buffers(logits, k))
    for _ in range(2):
        assert_same(to_host(draft_topk(device, k, workspace=workspace, out=out)), expected)
    assert not to_host(workspace[: rows * 5]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("shards", [2, 8])
def test_gpu_shards_give_what_one_row_gives(shards, rng):
    import cupy

    logits = spec.inputs(spec.CASES["k26"], rng)["logits"]
    found = in_shards(logits, 32, shards, PRODUCT, cupy.zeros, cupy.asarray)
    assert_same(to_host(found), spec.draft_topk(logits, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SMALL, PRODUCT])
def test_gpu_small_shapes(shape, rng):
    """Lists that suffice and lists that overflow; fit for the sanitizers."""
    import cupy

    logits = (rng.standard_normal((1, 3, 5000)) * 4).astype(F32)
    logits[0, 1] = np.sort(logits[0, 1])
    logits[0, 2] = 1
    for k in (5, 40):
        workspace = cupy.zeros(workspace_words(3, 5000, shape), np.int64)
        device, out = cupy.asarray(logits), to_gpu(buffers(logits, k))
        found = draft_topk(device, k, workspace=workspace, out=out, shape=shape)
        assert_same(to_host(found), spec.draft_topk(logits, k))
