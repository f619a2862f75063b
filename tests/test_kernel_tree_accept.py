"""The walk's kernel: the specification's paths, ties among siblings, trees that are none."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.spec import tree_accept as spec
from ddtree_numba.spec.tree_accept import Accept
from ddtree_numba.spec.tree_build import Tree
from tests.gpu_arrays import to_gpu

PLACES = [pytest.param(False, id="cpu"), pytest.param(True, id="gpu", marks=pytest.mark.gpu)]
ENGINE = {
    f"{n}_nodes_of_64": dict(nodes=n, sizes=[n, n - 1, 0, 1] * 16, tokens=3) for n in (65, 129, 257)
}


def moved(value, move):
    return type(value)(*(move(x) for x in vars(value).values()))


def accepted(tree, target_tokens, width, gpu=False):
    requests = len(tree.sizes)
    shapes = (requests, width), requests, requests
    out = Accept(*(np.full(shape, 77, np.int32) for shape in shapes))
    if gpu:
        tree, target_tokens, out = moved(tree, to_gpu), to_gpu(target_tokens), moved(out, to_gpu)
    assert tree_accept(tree, target_tokens, out=out) is out
    return moved(out, lambda x: x.get()) if gpu else out


def assert_as_specified(tree, target_tokens, gpu=False):
    expected = spec.tree_accept(tree, target_tokens)
    width = expected.nodes.shape[1]
    for wider in (0, 3):
        out = accepted(tree, target_tokens, width + wider, gpu)
        assert out.nodes[:, :width].tolist() == expected.nodes.tolist()
        assert (out.nodes[:, width:] == -1).all()
        assert out.counts.tolist() == expected.counts.tolist()
        assert out.next_tokens.tolist() == expected.next_tokens.tolist()


def tree_of(tokens, parents):
    tokens, parents = np.array(tokens, np.int32), np.array(parents, np.int32)
    sizes = np.full(len(parents), parents.shape[1], np.int32)
    return Tree(tokens, parents, np.zeros_like(parents), np.zeros(parents.shape, np.float32), sizes)


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize("name", spec.CASES)
def test_equals_the_specification(name, gpu):
    for seed in range(4):
        assert_as_specified(**spec.inputs(spec.CASES[name], np.random.default_rng(seed)), gpu=gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize("name", ENGINE)
def test_more_than_1200_rows(name, shape, rng):
    case = ENGINE[name] | dict(shape=shape)
    assert_as_specified(**spec.inputs(case | dict(tokens=1), rng), gpu=True)
    assert_as_specified(**spec.inputs(case, rng), gpu=True)


def test_nodes_of_several_rounds_of_the_block(rng):
    assert_as_specified(**spec.inputs(dict(nodes=257, sizes=[257, 129], tokens=2), rng))


def test_a_request_does_not_depend_on_its_company(rng):
    given = spec.inputs(spec.CASES["unequal"], rng)
    tree, targets = given["tree"], given["target_tokens"]
    together = accepted(tree, targets, 66)
    for r in range(4):
        alone = accepted(moved(tree, lambda x, r=r: x[r : r + 1]), targets[r : r + 1], 66)
        for one, all_of_them in zip(vars(alone).values(), vars(together).values(), strict=True):
            assert one[0].tobytes() == all_of_them[r].tobytes()


@pytest.mark.parametrize("gpu", PLACES)
def test_s12_unusable_rows_and_padding_match_nothing(gpu):
    tree = tree_of([[9, -1, -1], [9, 5, 5]], [[-1, 0, 0], [-1, 0, 1]])
    out = accepted(tree, np.array([[-1, -1, -1], [5, -1, 5]], np.int32), 3, gpu)
    assert out.counts.tolist() == [1, 2] and out.next_tokens.tolist() == [-1, -1]


@pytest.mark.parametrize("gpu", PLACES)
def test_s22_of_duplicate_siblings_the_lowest_index_wins(gpu):
    tree = tree_of([[7, 9, 9, 4, 4]] * 2, [[-1, 0, 0, 1, 2]] * 2)
    out = accepted(tree, np.array([[9, 4, 5, 6, 8]] * 2, np.int32), 4, gpu)
    assert out.nodes.tolist() == [[0, 1, 3, -1]] * 2
    assert out.next_tokens.tolist() == [6, 6], "as without the duplicate"


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize(
    "parents", [[-1, 0, 5, 2], [-1, 2, 1, 0], [0, 0, 1, 2], [-1, -1, -9, 3], [3, 3, 3, 3]]
)
def test_s22_walks_through_malformed_trees_end_and_stay_at_home(parents, gpu):
    tree = tree_of([[5] * 4] * 2, [parents, [-1, 0, 1, 2]])
    out = accepted(tree, np.full((2, 4), 5, np.int32), 4, gpu)
    assert out.nodes[1].tolist() == [0, 1, 2, 3] and out.counts[1] == 4
    path = out.nodes[0, : out.counts[0]]
    assert path[0] == 0 and (np.diff(path) > 0).all() and path.max() < 4


def test_a_width_below_the_path_cuts_it_where_the_target_goes_on():
    chain = tree_of([[5] * 4], [[-1, 0, 1, 2]])
    targets = np.array([[5, 5, 5, 8]], np.int32)
    out = accepted(chain, targets, 2)
    assert out.nodes.tolist() == [[0, 1]] and out.counts == 2 and out.next_tokens == 5


def test_what_does_not_fit_is_named():
    tree = tree_of([[5] * 4], [[-1, 0, 1, 2]])
    with pytest.raises(ValueError, match=r"target_tokens: shape \(1, 3\), expected \(1, 4\)"):
        accepted(tree, np.zeros((1, 3), np.int32), 4)
    with pytest.raises(ValueError, match="target_tokens: dtype int64, expected int32"):
        accepted(tree, np.zeros((1, 4), np.int64), 4)
    with pytest.raises(ValueError, match="tree: 1025 nodes, expected at most 1024"):
        accepted(tree_of([[5] * 1025], [range(-1, 1024)]), np.zeros((1, 1025), np.int32), 4)
