"""The walk through the tree: against a plain search, malformed trees, vectors of SGLang's tests."""

import numpy as np
import pytest

from ddtree_numba.spec.next_token import SamplingParams, next_token
from ddtree_numba.spec.tree_accept import CASES, inputs, tree_accept
from ddtree_numba.spec.tree_build import Tree, check_tree


def tree_of(tokens, parents):
    """A batch of trees from lists of one size."""
    tokens, parents = np.array(tokens, np.int32), np.array(parents, np.int32)
    depths = np.zeros_like(parents)
    for r, i in np.ndindex(parents.shape):
        if 0 <= parents[r, i] < i:
            depths[r, i] = depths[r, parents[r, i]] + 1
    sizes = np.full(len(parents), parents.shape[1], np.int32)
    return Tree(tokens, parents, depths, np.zeros(parents.shape, np.float32), sizes)


def search(tree, targets, r):
    """The walk of one request from its definition."""
    path = [0]
    while True:
        token = targets[r, path[-1]]
        matches = [
            i
            for i in range(1, tree.sizes[r])
            if tree.parents[r, i] == path[-1] and tree.tokens[r, i] == token and token >= 0
        ]
        if not matches:
            return path, token
        path.append(matches[0])


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_a_search(name):
    for seed in range(10):
        arguments = inputs(CASES[name], np.random.default_rng(seed))
        tree, targets = arguments["tree"], arguments["target_tokens"]
        accepted = tree_accept(tree, targets)
        for r, size in enumerate(tree.sizes):
            path, token = search(tree, targets, r) if size else ([], -1)
            assert accepted.counts[r] == len(path) and accepted.next_tokens[r] == token
            padding = accepted.nodes.shape[1] - len(path)
            assert accepted.nodes[r].tolist() == path + [-1] * padding


@pytest.mark.parametrize("name", CASES)
def test_a_request_does_not_depend_on_its_company(name):
    arguments = inputs(CASES[name], np.random.default_rng(3))
    tree, targets = arguments["tree"], arguments["target_tokens"]
    together = tree_accept(tree, targets)
    for r in range(len(tree.sizes)):
        fields = (tree.tokens, tree.parents, tree.depths, tree.scores, tree.sizes)
        alone = tree_accept(Tree(*(f[r : r + 1] for f in fields)), targets[r : r + 1])
        count = alone.counts[0]
        assert count == together.counts[r] and alone.next_tokens[0] == together.next_tokens[r]
        assert np.array_equal(alone.nodes[0, :count], together.nodes[r, :count])


def test_vectors_of_sgl_kernel():
    """sgl-kernel tests/speculative/test_eagle_utils.py::test_verify_tree_greedy."""
    tree = tree_of([range(6), range(7, 13)], [[-1, 0, 1, 0, 3, 4], [-1, 0, 1, 2, 0, 4]])
    targets = np.full((2, 6), 18, np.int32)
    targets[0, [0, 3, 4]] = 3, 4, 5
    targets[1, [0, 4]] = 11, 12
    accepted = tree_accept(tree, targets)
    assert accepted.nodes.tolist() == [[0, 3, 4, 5], [0, 4, 5, -1]]
    assert accepted.counts.tolist() == [4, 3] and accepted.next_tokens.tolist() == [18, 18]


def test_budget_four_build_and_follow():
    """tmt-ai-corp/vllm_ddtree tests/v1/spec_decode/test_ddtree.py: a followed spine."""
    tree = tree_of([[1, 5, 6, 7, 8]], [[-1, 0, 1, 2, 0]])
    accepted = tree_accept(tree, np.array([[5, 6, 7, 9, 2]]))
    assert accepted.nodes.tolist() == [[0, 1, 2, 3]] and accepted.next_tokens.tolist() == [9]


def test_s07_sibling_order_does_not_matter_to_a_tie():
    for drafts in ([2, 1], [1, 2]):
        tree = tree_of([[9, *drafts]], [[-1, 0, 0]])
        logits = np.float32([[1, 3, 3, 0]] * 3)
        targets = next_token(logits, np.arange(3), np.zeros(3, np.uint64), SamplingParams())
        accepted = tree_accept(tree, targets[None])
        assert accepted.nodes[0].tolist() == [0, 1 + drafts.index(1)]


def test_s12_a_bad_row_ends_the_walk_only_where_it_is_met():
    tree = tree_of([[9, 5, 6, 5]], [[-1, 0, 0, 1]])
    on_path = tree_accept(tree, np.array([[5, -1, 7, 8]]))
    assert on_path.nodes.tolist() == [[0, 1, -1]] and on_path.next_tokens.tolist() == [-1]
    off_path = tree_accept(tree, np.array([[5, 5, -1, 8]]))
    assert off_path.nodes.tolist() == [[0, 1, 3]] and off_path.next_tokens.tolist() == [8]
    at_root = tree_accept(tree, np.array([[-1, 5, 7, 8]]))
    assert at_root.counts.tolist() == [1] and at_root.next_tokens.tolist() == [-1]


def test_minus_one_matches_no_padding_and_no_child():
    tree = tree_of([[9, -1, -1]], [[-1, 0, 0]])
    accepted = tree_accept(tree, np.array([[-1, -1, -1]]))
    assert accepted.counts.tolist() == [1]


@pytest.mark.parametrize(
    "parents, index",
    [
        ([-1, 0, 5, 2], 2),  # a parent that does not exist
        ([-1, 2, 1], 1),  # a cycle
        ([0, 0, 1], 0),  # the root has a parent
        ([-1, -1], 1),  # two roots
        ([-1, 0, 2], 2),  # its own parent
        ([-1, 0, -2], 2),
    ],
)
def test_s22_malformed_trees_are_refused(parents, index):
    good = [-1, *range(len(parents) - 1)]
    tree = tree_of([range(len(parents))] * 2, [good, parents])
    message = rf"^parents\[1, {index}\] must be .* not {parents[index]}"
    with pytest.raises(ValueError, match=message):
        tree_accept(tree, np.zeros((2, len(parents)), np.int32))
    # the same entries beyond the size are not looked at
    check_tree(tree.parents, np.array([len(parents), index]))


@pytest.mark.parametrize("sizes", [[4], [-1], [1, 1], 1])
def test_s22_sizes_outside_the_buffer_are_refused(sizes):
    with pytest.raises(ValueError, match="^sizes must"):
        check_tree(np.array([[-1, 0, 1]]), np.array(sizes))


def test_s22_parents_and_targets_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match="^parents must"):
        check_tree(np.array([-1, 0]), np.array([2]))
    with pytest.raises(ValueError, match="^target_tokens must"):
        tree_accept(tree_of([[1, 2]], [[-1, 0]]), np.zeros((1, 3), np.int32))


def test_s22_of_duplicate_siblings_the_lowest_index_wins():
    tree = tree_of([[7, 9, 9, 4, 4]] * 2, [[-1, 0, 0, 1, 2]] * 2)
    accepted = tree_accept(tree, np.array([[9, 4, 5, 6, 8]] * 2))
    assert accepted.nodes.tolist() == [[0, 1, 3]] * 2
    assert accepted.next_tokens.tolist() == [6, 6], "as without the duplicate"
