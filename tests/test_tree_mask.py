"""Ancestor bits and paths, against a walk from each node to the root."""

import numpy as np
import pytest

from ddtree_numba.spec.tree_mask import CASES, inputs, tree_mask, tree_paths


def ancestors(parents, i):
    """Nodes from the root to i."""
    path = [i]
    while path[0]:
        path.insert(0, int(parents[path[0]]))
    return path


def bits(words, nodes):
    """bool[N, N] of one request's words, bit 0 of word 0 first."""
    columns = np.arange(nodes)
    shifted = words[:, columns // 64] >> (columns % 64).astype(np.uint64)
    return (shifted & np.uint64(1)).astype(bool)


def depths_of(parents, sizes):
    depths = np.full(parents.shape, 999, np.int32)  # poison
    for r, size in enumerate(sizes):
        depths[r, :size] = [len(ancestors(parents[r], i)) - 1 for i in range(size)]
    return depths


@pytest.mark.parametrize("name", CASES)
def test_s25_every_bit_and_every_path_past_64_nodes(name):
    arguments = inputs(CASES[name], np.random.default_rng(0))
    parents, sizes = arguments["parents"], arguments["sizes"]
    nodes = parents.shape[1]
    words = tree_mask(**arguments)
    depths = depths_of(parents, sizes)
    paths = tree_paths(parents, depths, sizes)
    assert words.dtype == np.uint64 and words.shape == (len(sizes), nodes, -(-nodes // 64))
    assert paths.dtype == np.int32
    deepest = max((depths[r, :size].max() for r, size in enumerate(sizes) if size), default=0)
    assert paths.shape == (len(sizes), nodes, deepest + 1)
    for r, size in enumerate(sizes):
        expected = np.zeros((nodes, nodes), bool)
        for i in range(size):
            path = ancestors(parents[r], i)
            expected[i, path] = True
            assert paths[r, i].tolist() == path + [-1] * (deepest + 1 - len(path))
        assert np.array_equal(bits(words[r], nodes), expected)
        assert np.all(paths[r, size:] == -1)


@pytest.mark.parametrize("node", [31, 32, 63, 64, 127, 128])
def test_s25_the_top_bits_of_words_are_unsigned(node):
    parents = np.minimum(np.arange(node + 1) - 1, 0)[None]  # a star: only the root and itself
    words = tree_mask(parents, np.array([node + 1]))
    assert sum(int(word) << (64 * w) for w, word in enumerate(words[0, node])) == (1 << node) | 1


def test_s25_the_stride_is_the_buffer_not_the_size():
    parents = inputs(dict(nodes=66, sizes=[5, 65]), np.random.default_rng(1))["parents"]
    words = tree_mask(parents, np.array([5, 65]))
    assert words.shape == (2, 66, 2)
    narrow = tree_mask(parents[:1, :5], np.array([5]))
    assert np.array_equal(words[0, :5, :1], narrow[0]) and not words[0, :, 1].any()
    assert not words[0, 5:].any() and not words[1, 65:].any()
    assert np.array_equal(words[1], tree_mask(parents[1:], np.array([65]))[0])


def test_paths_of_a_given_width():
    arguments = inputs(dict(nodes=4, sizes=[4], shape="chain"), np.random.default_rng(2))
    depths = np.arange(4)[None]
    assert tree_paths(depths=depths, width=6, **arguments)[0, 2].tolist() == [0, 1, 2, -1, -1, -1]
    with pytest.raises(ValueError, match="^width 3 "):
        tree_paths(depths=depths, width=3, **arguments)
    with pytest.raises(ValueError, match=r"^depths\[0, 2\]"):
        tree_paths(depths=np.array([[0, 1, 1, 3]]), **arguments)


def test_positions_of_sglang_follow_from_the_bits():
    """test_build_eagle_tree.py of sglang: position = context length + ancestors."""
    parents = np.array([[-1, 0, 0, 1, 2, 3, 4, 5], [-1, 0, 1, 1, 1, 1, 3, 6]])
    words = tree_mask(parents, np.array([8, 8]))
    depths = [bits(w, 8).sum(axis=1) - 1 for w in words]
    assert (5 + depths[0]).tolist() == [5, 6, 6, 7, 7, 8, 8, 9]
    assert (10 + depths[1]).tolist() == [10, 11, 12, 12, 12, 12, 13, 14]


@pytest.mark.parametrize("function", [tree_mask, lambda p, s: tree_paths(p, np.zeros_like(p), s)])
def test_s22_malformed_trees_are_refused(function):
    with pytest.raises(ValueError, match=r"^parents\[1, 2\] must"):
        function(np.array([[-1, 0, 1], [-1, 0, 5]]), np.array([3, 3]))
