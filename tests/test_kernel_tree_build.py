"""The builder's kernel: its specification's bits, ties by rank path, lists that end early."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import simt
from ddtree_numba.kernels.tree_build import FIRST, child_path, make, sibling_path, tree_build
from ddtree_numba.spec import tree_build as spec
from ddtree_numba.spec.numerics import F32
from ddtree_numba.spec.tree_build import Tree
from tests.gpu_arrays import to_gpu, to_host

FIELDS = [field.name for field in dataclasses.fields(Tree)]
PLACES = [pytest.param(False, id="cpu"), pytest.param(True, id="gpu", marks=pytest.mark.gpu)]


def given_of(rng, **case):
    given = spec.inputs(case, rng)
    return given | dict(token_ids=np.ascontiguousarray(given["token_ids"]))


def built(given, gpu=False):
    """The kernel's tree, in buffers that hold something else before."""
    shape = len(given["root_tokens"]), given["budget"] + 1
    arrays = tuple(np.full(shape, 77, F32 if name == "scores" else np.int32) for name in FIELDS[:4])
    arrays = *arrays, np.full(shape[0], 77, np.int32)
    if gpu:
        given, arrays = to_gpu(given), to_gpu(arrays)
    out = Tree(*arrays)
    assert tree_build(**given, out=out) is out
    return Tree(*to_host(arrays)) if gpu else out


def assert_same(tree, expected):
    for name in FIELDS:
        found, wanted = getattr(tree, name), getattr(expected, name)
        assert found.tobytes() == wanted.tobytes(), (name, found.tolist(), wanted.tolist())


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize("name", spec.CASES)
def test_equals_the_specification(name, gpu, rng):
    given = given_of(rng, **spec.CASES[name])
    assert_same(built(given, gpu), spec.tree_build(**given))


# Around the borders of lanes (32 nodes) and of instantiations (budgets to 32, 64, 128, 256).
@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize("budget", [1, 31, 32, 33, 64, 65, 129])
def test_budgets_around_the_width_of_a_warp(budget, gpu, rng):
    given = given_of(rng, requests=1, depths=4, k=9, budget=budget)
    assert_same(built(given, gpu), spec.tree_build(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [7, 16, 32, 63, 64, 127, 128, 256])
@pytest.mark.parametrize("values", [None, 1, 2, 5, 40])
@pytest.mark.parametrize("depths, k", [(7, 16), (7, 32), (15, 64)])
def test_equals_the_specification_at_engine_sizes(depths, k, values, budget, rng):
    case = dict(requests=64, depths=depths, k=k, budget=budget)
    given = given_of(rng, **case | (dict(values=values) if values else {}))
    assert_same(built(given, gpu=True), spec.tree_build(**given))


@pytest.mark.parametrize("gpu", PLACES)
def test_equal_scores_of_deep_paths(gpu, rng):
    """All of 15 lists equal: a node's path is the only thing that orders it."""
    given = given_of(rng, requests=1, depths=15, k=64, budget=256 if gpu else 40, values=1)
    assert_same(built(given, gpu), spec.tree_build(**given))


@pytest.mark.parametrize("gpu", PLACES)
def test_equal_scores_on_different_ways(gpu):
    """Sums that meet: -1 - 2 = -2 - 1 = -3, with the tie across lanes and within one."""
    row = -np.arange(9, dtype=F32)
    given = dict(
        root_tokens=np.array([3], np.int32),
        token_ids=np.arange(36, dtype=np.int32).reshape(1, 4, 9),
        log_probs=np.tile(row, (1, 4, 1)),
        budget=60,
    )
    tree = built(given, gpu)
    assert_same(tree, spec.tree_build(**given))
    assert len(set(tree.scores[0].tolist())) < 8


@pytest.mark.parametrize("gpu", PLACES)
def test_certain_drafts_have_positive_zeros(gpu):
    """Log-probabilities of 0 and -0 give scores of 0, whose bits are those of the specification."""
    log_probs = np.full((1, 3, 3), -np.inf, F32)
    log_probs[0, :, 0] = 0, -0.0, 0
    token_ids = np.arange(9, dtype=np.int32).reshape(1, 3, 3)
    given = dict(root_tokens=np.array([1], np.int32), token_ids=token_ids, log_probs=log_probs)
    tree = built(given | dict(budget=20), gpu)
    assert_same(tree, spec.tree_build(**given, budget=20))
    assert not np.signbit(tree.scores[0, :4]).any()


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize("ends", [(2, 1, 4), (2, 0, 4), (0, 4, 4), (4, 4, 1)])
def test_s12_nan_ends_the_candidates_of_a_depth(ends, gpu, rng):
    given = given_of(rng, requests=2, depths=3, k=4, budget=50)
    for depth, end in enumerate(ends):
        given["log_probs"][1, depth, end:] = np.nan
    tree = built(given, gpu)
    assert_same(tree, spec.tree_build(**given))
    assert tree.sizes[0] > tree.sizes[1]


@pytest.mark.parametrize("gpu", PLACES)
def test_s23_every_log_probability_minus_infinity(gpu, rng):
    given = given_of(rng, requests=1, depths=3, k=3, budget=12)
    given["log_probs"][...] = -np.inf
    assert_same(built(given, gpu), spec.tree_build(**given))


@pytest.mark.parametrize("gpu", PLACES)
def test_s26_max_depths_cap_each_request(gpu, rng):
    given = given_of(rng, requests=4, depths=5, k=4, budget=20)
    given["max_depths"] = np.array([0, 2, 5, 99], np.int32)
    tree = built(given, gpu)
    assert_same(tree, spec.tree_build(**given))
    assert tree.depths.max(axis=1).tolist()[:2] == [0, 2] and tree.sizes[0] == 1


@pytest.mark.parametrize("gpu", PLACES)
def test_a_request_does_not_depend_on_its_company(gpu, rng):
    given = given_of(rng, requests=4, depths=7, k=8, budget=20)
    together = built(given, gpu)
    for rows in ([2], [3, 2]):
        part = {name: value[rows] for name, value in given.items() if name != "budget"}
        alone = built(part | dict(budget=20), gpu)
        for name in FIELDS:
            mine = getattr(alone, name)[rows.index(2)]
            assert mine.tobytes() == getattr(together, name)[2].tobytes()


def test_a_smaller_budget_gives_a_prefix_in_every_instantiation(rng):
    given = given_of(rng, requests=1, depths=7, k=8, budget=70, values=6)
    largest = built(given)
    for budget in (0, 5, 32, 40, 64):
        tree = built(given | dict(budget=budget))
        for name in FIELDS[:4]:
            wanted = np.ascontiguousarray(getattr(largest, name)[:, : budget + 1])
            assert getattr(tree, name).tobytes() == wanted.tobytes(), (budget, name)


def test_blocks_and_warps_may_run_in_any_order(rng):
    given = given_of(rng, requests=3, depths=3, k=4, budget=12)
    expected = spec.tree_build(**given)
    for _ in range(2):
        out = spec.empty_tree(3, 13)
        arrays = (getattr(out, name) for name in FIELDS)
        lists = given["root_tokens"], given["token_ids"], given["log_probs"], None
        body = make(1, False)
        simt.run(body, 3, body.threads, (*lists, *arrays, 3, 4, 12))
        assert_same(out, expected)


def test_codes_of_paths_sort_as_the_paths_and_fit_32_bits(rng):
    """Paths that a budget of 256 admits: their ancestors and better siblings number less."""
    to_sibling, to_child = simt.on_cpu(sibling_path), simt.on_cpu(child_path)
    paths = {(0,) * 15, (63,), (0,) * 14 + (63,), (1,) * 7, (15, 14)}
    while len(paths) < 400:
        path, product, before = [], 1, 0
        for _ in range(rng.integers(1, 16)):
            most = min((256 - before) // product, 64)
            if most < 1:
                break
            path.append(int(rng.integers(0, rng.integers(1, most + 1))))
            product *= path[-1] + 1
            before += product
        paths.add(tuple(path))
    codes = {}
    for path in paths:
        code = FIRST
        for depth, rank in enumerate(path):
            code = to_child(code) if depth else code
            for r in range(rank):
                code = to_sibling(code, r + 1)
        codes[path] = code
    assert len(set(codes.values())) == len(paths) and max(codes.values()) < 1 << 32
    ordered = sorted(paths)
    for i, path in enumerate(ordered):
        for later in ordered[i + 1 :]:
            # a path and its own ancestor never tie: the ancestor is in the tree before
            assert codes[path] < codes[later] or later[: len(path)] == path, (path, later)


def test_what_does_not_fit_is_named(rng):
    given = given_of(rng, requests=1, depths=2, k=3, budget=4)
    out = spec.empty_tree(1, 5)
    with pytest.raises(ValueError, match="budget: 257, expected 0 to 256"):
        tree_build(**given | dict(budget=257), out=out)
    with pytest.raises(ValueError, match="budget: -1, expected 0 to 256"):
        tree_build(**given | dict(budget=-1), out=out)
    with pytest.raises(ValueError, match="log_probs: candidates: 65, expected 0 to 64"):
        tree_build(**given | dict(log_probs=np.zeros((1, 2, 65), F32)), out=out)
    with pytest.raises(ValueError, match="log_probs: depths: 16, expected 0 to 15"):
        tree_build(**given | dict(log_probs=np.zeros((1, 16, 3), F32)), out=out)
    with pytest.raises(ValueError, match="log_probs: dtype float64, expected float32"):
        tree_build(**given | dict(log_probs=np.zeros((1, 2, 3))), out=out)
    with pytest.raises(ValueError, match=r"out.tokens: shape \(1, 4\), expected \(1, 5\)"):
        tree_build(**given, out=dataclasses.replace(out, tokens=np.zeros((1, 4), np.int32)))
    with pytest.raises(ValueError, match="max_depths: dtype int64, expected int32"):
        tree_build(**given, max_depths=np.zeros(1, np.int64), out=out)
