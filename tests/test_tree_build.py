"""The builder against enumeration of all paths, a level-parallel builder and a published one."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.spec.draft_topk import draft_topk
from ddtree_numba.spec.numerics import F32
from ddtree_numba.spec.tree_accept import tree_accept
from ddtree_numba.spec.tree_build import CASES, check_tree, inputs, tree_build

REFERENCE = json.loads((Path(__file__).parent / "data/ddtree_reference_cases.json").read_text())
FIELDS = ("tokens", "parents", "depths", "scores", "sizes")


def score_of(log_probs, path):
    """Left-to-right float32 sum."""
    total = np.float32(0)
    for depth, rank in enumerate(path):
        total = np.float32(total + log_probs[depth][rank])
    return float(total)


def enumerate_paths(log_probs, budget):
    """Rank paths of the best nodes, root first, from all that there are."""
    depths, k = log_probs.shape
    paths = [p for d in range(1, depths + 1) for p in product(range(k), repeat=d)]
    return [(), *sorted(paths, key=lambda p: (-score_of(log_probs, p), p))[:budget]]


def level_by_level(log_probs, budget):
    """The same from the best `budget` of each depth, which extend the best of the depth above.

    This is how a GPU builds: depth by depth, each in parallel. It is exact, because a path is never
    better than its own prefix.
    """
    best, found = [(0.0, ())], []
    for row in log_probs:
        longer = [
            (-np.float32(lp - negative), (*path, rank))
            for negative, path in best
            for rank, lp in enumerate(row)
        ]
        best = sorted(longer)[:budget]
        found += best
    return [(), *(path for _, path in sorted(found)[:budget])]


def assert_is(tree, request, paths, arguments):
    """Every field of one request follows from its rank paths."""
    size, index = len(paths), {path: i for i, path in enumerate(paths)}
    token_ids, log_probs = arguments["token_ids"][request], arguments["log_probs"][request]
    tokens = [token_ids[len(p) - 1, p[-1]] for p in paths[1:]]
    assert tree.sizes[request] == size
    assert tree.tokens[request, :size].tolist() == [arguments["root_tokens"][request], *tokens]
    assert tree.parents[request, :size].tolist() == [-1, *(index[p[:-1]] for p in paths[1:])]
    assert tree.depths[request, :size].tolist() == [len(p) for p in paths]
    assert tree.scores[request, :size].tolist() == [score_of(log_probs, p) for p in paths]
    assert np.all(tree.tokens[request, size:] == -1) and np.all(tree.parents[request, size:] == -1)
    assert np.all(tree.depths[request, size:] == 0)
    assert np.all(tree.scores[request, size:] == -np.inf)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_enumeration_or_with_the_level_parallel_builder(name):
    arguments = inputs(CASES[name], np.random.default_rng(0))
    log_probs = arguments["log_probs"]
    tree = tree_build(**arguments)
    small = log_probs.shape[2] ** log_probs.shape[1] <= 5000
    for r in range(len(log_probs)):
        paths = (enumerate_paths if small else level_by_level)(log_probs[r], arguments["budget"])
        assert_is(tree, r, paths, arguments)


@pytest.mark.parametrize("values", [None, 1, 2, 5])
def test_agrees_with_the_level_parallel_builder_at_engine_sizes(values):
    case = dict(requests=6, depths=7, k=16, budget=64) | (dict(values=values) if values else {})
    arguments = inputs(case, np.random.default_rng(8))
    tree = tree_build(**arguments)
    for r in range(6):
        assert_is(tree, r, level_by_level(arguments["log_probs"][r], 64), arguments)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("depths, k", [(1, 1), (1, 3), (2, 2), (3, 3), (4, 3), (4, 1), (2, 7)])
def test_s23_every_budget_of_small_trees_agrees_with_enumeration(depths, k, ties):
    case = dict(requests=2, depths=depths, k=k, budget=0) | (dict(values=2) if ties else {})
    arguments = inputs(case, np.random.default_rng(depths * 10 + k))
    possible = sum(k**d for d in range(1, depths + 1))
    for budget in {0, 1, 2, 5, possible - 1, possible, possible + 1, 1024}:
        tree = tree_build(**arguments | dict(budget=budget))
        assert np.all(tree.sizes == 1 + min(budget, possible))
        assert tree.tokens.shape == (2, budget + 1)
        for r in range(2):
            assert_is(tree, r, enumerate_paths(arguments["log_probs"][r], budget), arguments)


def test_s23_budgets_of_a_two_deep_tree_with_three_candidates():
    arguments = inputs(dict(requests=1, depths=2, k=3, budget=0), np.random.default_rng(1))
    sizes = [tree_build(**arguments | dict(budget=b)).sizes[0] for b in (0, 1, 11, 12, 13, 1024)]
    assert sizes == [1, 2, 12, 13, 13, 13]
    for budget in (-1, 2.5):
        with pytest.raises(ValueError, match="^budget must"):
            tree_build(**arguments | dict(budget=budget))


def test_s23_no_draft_positions_or_candidates_give_the_root_alone():
    for depths, k in ((0, 4), (0, 0), (3, 0)):
        arguments = inputs(dict(requests=2, depths=depths, k=k, budget=7), np.random.default_rng(2))
        tree = tree_build(**arguments)
        assert tree.sizes.tolist() == [1, 1] and tree.tokens.shape == (2, 8)
        assert tree.tokens[:, 0].tolist() == arguments["root_tokens"].tolist()


def test_s23_equal_log_probs_are_ordered_by_rank_path():
    arguments = dict(
        root_tokens=np.array([9]),
        token_ids=np.array([[[5, 6], [7, 8]]], np.int32),
        log_probs=np.zeros((1, 2, 2), F32),
    )
    tree = tree_build(**arguments, budget=6)
    # (0), (0,0), (0,1), (1), (1,0), (1,1)
    assert tree.tokens.tolist() == [[9, 5, 7, 8, 6, 7, 8]]
    assert tree.parents.tolist() == [[-1, 0, 1, 1, 0, 4, 4]]


def test_s23_minus_infinity_makes_nodes_after_all_finite_ones():
    log_probs = np.float32([[[-1, -np.inf], [-2, -np.inf]]])
    token_ids = np.array([[[5, 6], [7, 8]]], np.int32)
    tree = tree_build(np.array([0]), token_ids, log_probs, 6)
    assert tree.tokens.tolist() == [[0, 5, 7, 8, 6, 7, 8]]
    assert tree.scores.tolist() == [[0, -1, -3, *[-np.inf] * 4]]
    check_tree(tree.parents, tree.sizes)


def test_s12_nan_ends_the_candidates_of_a_depth():
    nan = np.nan
    token_ids = np.arange(12, dtype=np.int32).reshape(1, 3, 4)
    partly = np.float32([[[-1, -2, nan, nan], [-1, nan, nan, nan], [-1, -1, -1, -1]]])
    tree = tree_build(np.array([0]), token_ids, partly, 100)
    assert tree.sizes[0] == 1 + 2 + 2 + 8 and not np.any(np.isnan(tree.scores))
    assert not {2, 3, 5, 6, 7} & set(tree.tokens[0].tolist())
    partly[0, 1] = nan
    assert tree_build(np.array([0]), token_ids, partly, 100).sizes[0] == 3, "no depth below"
    partly[0, 0] = nan
    assert tree_build(np.array([0]), token_ids, partly, 100).sizes[0] == 1


@pytest.mark.parametrize("name", ["ties", "two_words", "minus_infinity", "all_equal"])
def test_a_smaller_budget_gives_a_prefix(name):
    arguments = inputs(CASES[name], np.random.default_rng(3))
    largest = tree_build(**arguments)
    for budget in (0, 1, 2, 7, 8, 16, 29):
        tree = tree_build(**arguments | dict(budget=budget))
        for field in FIELDS[:-1]:
            expected = getattr(largest, field)[:, : budget + 1]
            assert np.array_equal(getattr(tree, field), expected), field


@pytest.mark.parametrize("name", ["ties", "two_words", "minus_infinity", "all_equal", "largest"])
def test_scores_do_not_increase_and_parents_come_first(name):
    tree = tree_build(**inputs(CASES[name], np.random.default_rng(4)))
    check_tree(tree.parents, tree.sizes)
    for r, size in enumerate(tree.sizes):
        assert np.all(tree.scores[r, 1:size] <= tree.scores[r, : size - 1])
        siblings = list(zip(tree.parents[r, :size], tree.tokens[r, :size], strict=True))
        assert len(set(siblings)) == size


def test_s26_max_depths_cap_each_request():
    arguments = inputs(CASES["ties"], np.random.default_rng(5))
    caps = np.array([0, 2, 99])
    tree = tree_build(**arguments, max_depths=caps)
    for r, cap in enumerate(caps):
        cut = {name: arguments[name][r : r + 1, :cap] for name in ("token_ids", "log_probs")}
        alone = tree_build(arguments["root_tokens"][r : r + 1], **cut, budget=arguments["budget"])
        for field in FIELDS:
            assert np.array_equal(getattr(alone, field)[0], getattr(tree, field)[r]), field
        assert tree.depths[r].max() <= cap
    with pytest.raises(ValueError, match="^max_depths must"):
        tree_build(**arguments, max_depths=np.array([0, -1, 2]))


def test_a_request_does_not_depend_on_its_company():
    arguments = inputs(dict(requests=5, depths=7, k=8, budget=40), np.random.default_rng(6))
    together = tree_build(**arguments)
    for rows in ([3], [4, 3], [0, 1, 2, 3]):
        part = {n: v[rows] for n, v in arguments.items() if n != "budget"}
        alone = tree_build(**part, budget=40)
        for field in FIELDS:
            assert np.array_equal(getattr(alone, field)[rows.index(3)], getattr(together, field)[3])


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(log_probs=np.zeros((1, 2, 3))), "log_probs"),
        (dict(log_probs=np.zeros((2, 3), F32)), "log_probs"),
        (dict(log_probs=np.full((1, 2, 3), 0.5, F32)), "log_probs"),
        (dict(log_probs=np.float32([[[-1, -2, -3], [-2, -1, -3]]])), "log_probs"),
        (dict(log_probs=np.float32([[[-1, np.nan, -3], [-2, -3, -3]]])), "log_probs"),
        (dict(token_ids=np.zeros((1, 2, 4), np.int32)), "token_ids"),
        (dict(root_tokens=np.zeros(2, np.int32)), "root_tokens"),
        (dict(max_depths=np.zeros(3, np.int32)), "max_depths"),
    ],
)
def test_malformed_input_is_refused_by_name(change, name):
    arguments = inputs(dict(requests=1, depths=2, k=3, budget=4), np.random.default_rng(7))
    tree_build(**arguments)
    with pytest.raises(ValueError, match=f"^{name} "):
        tree_build(**arguments | change)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: f"seed{case['seed']}")
def test_agrees_with_the_published_implementation(case):
    seed, depths, vocabulary = case["seed"], case["L"], case["V"]
    logits = np.random.default_rng(seed).standard_normal((depths, vocabulary)) * case["scale"]
    logits = logits.astype(F32)
    boosted = np.random.default_rng(1000 + seed).integers(0, vocabulary, depths)
    boost = np.linspace(2.5 * case["scale"], 0, depths).astype(F32)
    logits[np.arange(depths), boosted] += boost
    candidates = draft_topk(logits[None], case["budget"])
    tree = tree_build(np.array([77]), *candidates, case["budget"])
    size = len(case["parents"])
    assert tree.sizes[0] == size
    assert tree.tokens[0, :size].tolist() == [77, *case["tree_tokens"]]
    assert tree.depths[0, :size].tolist() == [0, *case["tree_depths"]]
    assert tree.parents[0, :size].tolist() == case["parents"]
    targets = np.full(tree.tokens.shape, -1, np.int32)
    targets[0, :size] = case["target_after_node"]
    accepted = tree_accept(tree, targets)
    count = len(case["accepted_nodes"])
    assert accepted.counts[0] == count and accepted.next_tokens[0] == case["next_token"]
    assert accepted.nodes[0, :count].tolist() == case["accepted_nodes"]
