"""The tree attention kernels: against the specification, and the law against themselves.

Plain decoding is the tree of one node whose ancestors are committed. On the CPU executor widths are
small; the tests marked gpu take K2.6's and a thousand random trees.
"""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.tree_attention import Workspace, plan_attention, tree_attention, workspace
from ddtree_numba.spec import tree_attention as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host
from tests.test_tree_attention import dense

SMALL = dict(h=2, W=32, latent=16)
EMBEDDED = dict(h=8, W=80, latent=64)
K26 = dict(h=8, W=576, latent=512)
CASES = {
    "root_only": dict(starts=[0], sizes=[1], N=1, **EMBEDDED),
    "one_row": dict(starts=[150], sizes=[1], N=1, **EMBEDDED),
    "one_head": dict(starts=[70], sizes=[3], N=3, h=1, W=80, latent=64),
    "heads_9": dict(starts=[40], sizes=[2], N=2, h=9, W=32, latent=16),
    "embedded": dict(starts=[130], sizes=[3], N=3, **EMBEDDED),
    "padding": dict(starts=[9, 3, 0, 0], sizes=[4, 1, 1, 0], N=5, **SMALL),
    "page_edges": dict(starts=[63, 64, 65], sizes=[1, 1, 2], N=2, **SMALL),
    "split_edges": dict(starts=[127], sizes=[3], N=3, **SMALL),
    "chain": dict(starts=[30], sizes=[5], N=5, chain=True, **SMALL),
}
# Largest error of a result against float64, as a share of the greatest value that it averages:
# weights and results are rounded to bfloat16, scores and sums differ by float32's rounding.
ERROR = 2**-8


def inputs(case, rng):
    given = spec.inputs(case, rng)
    return {k: v.astype(np.int32) if k == "page_table" else v for k, v in given.items()}


def space_for(given, blocks, empty=np.empty):
    requests, nodes, heads, _ = given["q"].shape
    depths, positions = given["paths"].shape[2], 64 * given["page_table"].shape[1]
    sizes = workspace(requests, nodes, depths, heads, given["latent"], positions, blocks)
    return Workspace(**{name: empty(*each) for name, each in sizes.items()})


def run(given, blocks=3, empty=np.empty):
    """Plan and attention into a result that held NaN."""
    space, heads = space_for(given, blocks, empty), given["q"].shape[2]
    batch = {name: given[name] for name in ("starts", "paths", "sizes")}
    positions = 64 * given["page_table"].shape[1]
    plan_attention(**batch, heads=heads, positions=positions, workspace=space)
    out = empty((*given["q"].shape[:3], given["latent"]), BF16)
    out[...] = np.nan
    assert tree_attention(**given, workspace=space, out=out) is out
    return out


def decoding(given, wanted):
    """Plain decoding of nodes (request, node) as one batch: shared pages, own last ones."""
    pages, table = [given["pages"]], []
    depths = max(np.count_nonzero(given["paths"][r, i] >= 0) for r, i in wanted)
    own, fresh = depths // 64 + 2, len(given["pages"])
    starts, q, scratch = [], [], []
    for r, i in wanted:
        start, path = int(given["starts"][r]), given["paths"][r, i]
        path = path[path >= 0]
        keys = given["scratch"][r, path]
        last = np.full((own, 64, keys.shape[1]), np.nan, BF16)
        inside = start % 64
        if inside:
            last[0, :inside] = given["pages"][given["page_table"][r, start // 64], :inside]
        last.reshape(own * 64, -1)[inside : inside + len(path) - 1] = keys[:-1]
        pages.append(last)
        row = list(given["page_table"][r, : start // 64]) + list(range(fresh, fresh + own))
        table.append(row)
        fresh += own
        starts.append(start + len(path) - 1)
        q.append(given["q"][r, i])
        scratch.append(keys[-1])
    width = max(map(len, table))
    table = [row + [-1] * (width - len(row)) for row in table]
    count = len(wanted)
    return given | dict(
        q=np.array(q)[:, None],
        pages=np.concatenate(pages),
        scratch=np.array(scratch)[:, None],
        page_table=np.array(table, np.int32),
        starts=np.array(starts, np.int32),
        paths=np.zeros((count, 1, 1), np.int32),
        sizes=np.ones(count, np.int32),
    )


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_specification(name, rng):
    given = inputs(CASES[name], rng)
    out, expected = run(given), spec.tree_attention(**given)
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **spec.TOLERANCE)
    assert not out[given["sizes"] == 0].any()


@pytest.mark.parametrize("name", ["embedded", "split_edges", "heads_9"])
def test_s09_a_node_has_the_bits_of_plain_decoding(name, rng):
    given = inputs(CASES[name], rng)
    out = run(given)
    wanted = [(r, i) for r, size in enumerate(given["sizes"]) for i in range(size)]
    alone = run(decoding(given, wanted), blocks=2)
    for (r, i), bits in zip(wanted, alone, strict=True):
        assert bits[0].tobytes() == out[r, i].tobytes(), (r, i)


def test_s09_neither_blocks_nor_company_show_in_the_bits(rng):
    given = inputs(CASES["chain"], rng)
    out = run(given, blocks=1)
    assert run(given, blocks=40).tobytes() == out.tobytes()
    few = {n: given[n][:, :2] for n in ("q", "scratch", "paths")} | {"sizes": np.array([2], "i4")}
    few = {n: np.ascontiguousarray(v) for n, v in few.items()}
    assert run(given | few).tobytes() == out[:, :2].tobytes()


def test_page_order_does_not_matter(rng):
    given = inputs(CASES["page_edges"], rng)
    out = run(given)
    order = rng.permutation(len(given["pages"]))
    table = np.argsort(order)[given["page_table"]].astype(np.int32)
    moved = {"pages": given["pages"][order], "page_table": table}
    assert run(given | moved).tobytes() == out.tobytes()


def test_s12_a_nan_key_reaches_its_descendants_only(rng):
    given = inputs(CASES["chain"] | dict(chain=False), rng)
    clean = run(given)
    given["scratch"][0, 3] = np.nan
    out = run(given)
    below = (given["paths"][0] == 3).any(1)
    assert below.any() and not below.all() and np.isnan(out[0, below].astype(F32)).all()
    assert out[0, ~below].tobytes() == clean[0, ~below].tobytes()


def test_one_score_far_above_the_others(rng):
    """The running maximum jumps in the middle: what came before weighs nothing."""
    given = inputs(dict(starts=[90], sizes=[2], N=2, **SMALL), rng)
    page, direction = given["page_table"][0, 0], given["q"][0, 0, 0].astype(F32)
    given["pages"][page, 40] = (100 * direction).astype(BF16)
    out = run(given)
    error = np.abs(out.astype(np.float64) - dense(given))
    assert error.max() < ERROR * np.abs(given["pages"][page, :, :16].astype(F32)).max()


def test_shapes_that_do_not_fit_are_named(rng):
    given = inputs(CASES["one_row"], rng)
    space = space_for(given, 2)
    out = np.empty((1, 1, 8, 64), BF16)

    def refuse(message, **other):
        with pytest.raises(ValueError, match=message):
            tree_attention(**given | dict(workspace=space, out=out) | other)

    refuse(r"pages: shape \(\d+, 32, 80\)", pages=np.zeros((3, 32, 80), BF16))
    refuse("q: dtype float32", q=given["q"].astype(F32))
    refuse(r"scratch: shape \(1, 2, 80\)", scratch=np.zeros((1, 2, 80), BF16))
    refuse("latent 72, width 80: expected", latent=72, out=np.zeros((1, 1, 8, 72), BF16))
    refuse(r"workspace.partial: shape", workspace=space_for(given | dict(latent=32), 2))


# --- on a GPU


def device_run(given, blocks=132):
    import cupy

    return to_host(run(to_gpu(given), blocks, lambda shape, dtype: cupy.empty(shape, dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_small_shapes(name, rng):
    """Few keys and nodes: what compute-sanitizer runs."""
    given = inputs(CASES[name], rng)
    out, expected = device_run(given, blocks=5), spec.tree_attention(**given)
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **spec.TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 2, 9, 17, 31, 32, 33, 63, 64, 65, 129, 257])
def test_gpu_error_against_float64(nodes, rng):
    given = inputs(dict(starts=[1000], sizes=[nodes], N=nodes, **K26), rng)
    out = device_run(given)
    some = [(0, int(i)) for i in np.unique(np.linspace(0, nodes - 1, 6).astype(int))]
    found, alone = np.array([out[at] for at in some])[:, None], decoding(given, some)
    expected = spec.tree_attention(**alone)
    np.testing.assert_allclose(found.astype(F32), expected.astype(F32), **spec.TOLERANCE)
    error = np.abs(found.astype(np.float64) - dense(alone))
    assert error.max() < ERROR * np.abs(given["scratch"].astype(F32)).max()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64])
def test_gpu_any_number_of_heads(heads, rng):
    given = inputs(dict(starts=[300, 0], sizes=[9, 4], N=9, h=heads, W=576, latent=512), rng)
    expected = spec.tree_attention(**given)
    out = device_run(given)
    np.testing.assert_allclose(out.astype(F32), expected.astype(F32), **spec.TOLERANCE)


def boundary(rng):
    """A number of committed positions, mostly near a chunk's, page's or split's end."""
    edge = int(rng.choice([32, 64, 128, 256, 512, 1024]))
    return max(0, edge * int(rng.integers(0, 1 + 1100 // edge)) + int(rng.integers(-12, 12)))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_gpu_s09_a_thousand_trees_have_the_bits_of_plain_decoding(seed):
    """Fifty trees a batch, every node."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 24, 50).tolist()
    shape = K26 if seed % 10 == 0 else EMBEDDED
    case = dict(starts=[boundary(rng) for _ in sizes], sizes=sizes, N=max(sizes), **shape)
    given = inputs(case, rng)
    out = device_run(given, int(rng.integers(1, 200)))
    wanted = [(r, i) for r, size in enumerate(sizes) for i in range(size)]
    alone = device_run(decoding(given, wanted))[:, 0]
    assert np.array([out[r, i] for r, i in wanted]).tobytes() == alone.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("start", [8185, 8192, 16_383, 32_760, 32_768, 33_000, 34_810])
def test_gpu_s09_long_contexts_have_the_bits_of_plain_decoding(start, rng):
    for nodes in (2, 17):
        given = inputs(dict(starts=[start], sizes=[nodes], N=nodes, **EMBEDDED), rng)
        out = device_run(given)
        alone = device_run(decoding(given, [(0, i) for i in range(nodes)]))
        assert out[0].tobytes() == alone[:, 0].tobytes(), nodes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["identical", "huge", "growing", "tiny"])
def test_gpu_adversarial_keys(kind, rng):
    given = inputs(dict(starts=[700], sizes=[9], N=9, **K26), rng)
    used = given["page_table"][0, :11]
    if kind == "identical":
        given["pages"][used] = given["scratch"][0, 0]
    elif kind == "huge":
        given["pages"][used[4], 17] = (30 * given["q"][0, 0, 0].astype(F32)).astype(BF16)
    elif kind == "growing":
        given["pages"][used] *= np.linspace(0, 40, 11).astype(BF16)[:, None, None]
    else:
        given["q"] = (given["q"].astype(F32) * 1e-30).astype(BF16)
    out = device_run(given)
    error = np.abs(out.astype(np.float64) - dense(given))
    most = np.abs(np.nan_to_num(given["pages"][used].astype(F32))).max()
    assert error.max() < ERROR * most
    alone = device_run(decoding(given, [(0, i) for i in range(9)]))
    assert out[0].tobytes() == alone[:, 0].tobytes()


@pytest.mark.gpu
def test_gpu_m01_what_must_not_be_read_may_be_nan(rng):
    """`inputs` fills all of it with NaN; other contents give the same bits."""
    given = inputs(dict(starts=[100, 77, 0], sizes=[5, 17, 0], N=17, **K26), rng)
    out = device_run(given)
    assert np.isfinite(out.astype(F32)).all() and not out[0, 5:].any() and not out[2].any()
    other = {n: np.nan_to_num(given[n].astype(F32), nan=7).astype(BF16) for n in ("pages", "q")}
    assert device_run(given | other).tobytes() == out.tobytes()
