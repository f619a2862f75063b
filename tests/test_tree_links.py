"""First child and next sibling, against a plain search and vectors of SGLang's tests."""

import numpy as np
import pytest

from ddtree_numba.spec.tree_links import CASES, inputs, tree_links


def search(parents, size):
    """Links of one request from their definition."""
    children = [[j for j in range(size) if parents[j] == i] for i in range(size)]
    first = [c[0] if c else -1 for c in children]
    following = [[j for j in range(i + 1, size) if parents[j] == parents[i]] for i in range(size)]
    return first, [f[0] if i and f else -1 for i, f in enumerate(following)]


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_a_search(name):
    arguments = inputs(CASES[name], np.random.default_rng(0))
    first_child, next_sibling = tree_links(**arguments)
    assert first_child.dtype == next_sibling.dtype == np.int32
    for r, size in enumerate(arguments["sizes"]):
        first, following = search(arguments["parents"][r], size)
        assert first_child[r, :size].tolist() == first
        assert next_sibling[r, :size].tolist() == following
        assert np.all(first_child[r, size:] == -1) and np.all(next_sibling[r, size:] == -1)


@pytest.mark.parametrize(
    "parents, first, following",
    [
        # sgl-kernel tests/speculative/test_eagle_utils.py, first request
        ([-1, 0, 1, 0, 3, 4], [1, 2, -1, 4, 5, -1], [-1, 3, -1, -1, -1, -1]),
        # its second request, which links child 4 before child 1; ours ascend
        ([-1, 0, 1, 2, 0, 4], [1, 2, 3, -1, 5, -1], [-1, 4, -1, -1, -1, -1]),
        # sglang test/registered/spec/utils/test_build_eagle_tree.py
        ([-1, 0, 0, 1, 2, 3, 4, 5], [1, 3, 4, 5, 6, 7, -1, -1], [-1, 2, -1, -1, -1, -1, -1, -1]),
        ([-1, 0, 1, 1, 1, 1, 3, 6], [1, 2, -1, 6, -1, -1, 7, -1], [-1, -1, 3, 4, 5, -1, -1, -1]),
        # uneven fan-out of sglang test/registered/unit/spec/test_dflash_tree.py
        ([-1, 0, 0, 2, 2, 3], [1, -1, 3, 5, -1, -1], [-1, 2, -1, 4, -1, -1]),
    ],
)
def test_vectors_of_sglang(parents, first, following):
    first_child, next_sibling = tree_links(np.array([parents], np.int32), np.array([len(parents)]))
    assert first_child.tolist() == [first] and next_sibling.tolist() == [following]


def test_links_lead_to_every_node_once():
    arguments = inputs(dict(nodes=200, sizes=[200]), np.random.default_rng(1))
    first_child, next_sibling = (links[0] for links in tree_links(**arguments))
    seen, stack = [], [0]
    while stack:
        node = stack.pop()
        seen.append(node)
        stack += [i for i in (next_sibling[node], first_child[node]) if i >= 0]
    assert sorted(seen) == list(range(200))


def test_a_request_does_not_depend_on_its_company():
    arguments = inputs(CASES["unequal"], np.random.default_rng(2))
    together = tree_links(**arguments)
    alone = tree_links(arguments["parents"][1:2], arguments["sizes"][1:2])
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one[0], other[1])


def test_s22_malformed_trees_are_refused():
    with pytest.raises(ValueError, match=r"^parents\[1, 2\] must"):
        tree_links(np.array([[-1, 0, 1], [-1, 0, 5]]), np.array([3, 3]))
