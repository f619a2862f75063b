"""First child and next sibling: the specification's bits, at any size."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.tree_links import tree_links
from ddtree_numba.spec import tree_links as spec
from tests.gpu_arrays import to_gpu, to_host

PLACES = [pytest.param(False, id="cpu"), pytest.param(True, id="gpu", marks=pytest.mark.gpu)]
LARGE = {
    f"{shape}_of_{n}": dict(nodes=n, sizes=[n, n - 1, 0, 1], shape=shape)
    for shape in ("chain", "star", "random")
    for n in (129, 257)
}


def linked(given, gpu=False):
    out = tuple(np.full_like(given["parents"], 77) for _ in range(2))
    if gpu:
        given, out = to_gpu(given), to_gpu(out)
    assert tree_links(**given, out=out) is out
    return to_host(out) if gpu else out


def assert_as_specified(given, gpu=False):
    for links, expected in zip(linked(given, gpu), spec.tree_links(**given), strict=True):
        assert links.tobytes() == expected.tobytes()


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize("name", spec.CASES)
def test_equals_the_specification(name, gpu, rng):
    assert_as_specified(spec.inputs(spec.CASES[name], rng), gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_more_than_1200_rows(name, rng):
    case = LARGE[name]
    assert_as_specified(spec.inputs(case | dict(sizes=case["sizes"] * 16), rng), gpu=True)


def test_nodes_of_several_blocks(rng):
    assert_as_specified(spec.inputs(LARGE["random_of_129"], rng))


def test_a_request_does_not_depend_on_its_company(rng):
    given = spec.inputs(dict(nodes=40, sizes=[40, 17, 3]), rng)
    together = linked(given)
    for r in range(3):
        alone = linked({name: value[r : r + 1] for name, value in given.items()})
        assert [x.tobytes() for x in alone] == [x[r].tobytes() for x in together]


@pytest.mark.parametrize("parents", [[-1, 0, 5, 2], [-1, 2, 1, 0], [0, 0, 1, 2], [-1, -1, -9, 3]])
def test_s22_links_of_malformed_trees_lead_to_later_nodes_alone(parents):
    """So no walk along them runs in circles or leaves its request."""
    both = np.array([parents, [-1, 0, 1, 1]], np.int32)
    links = linked(dict(parents=both, sizes=np.array([4, 4], np.int32)))
    for link in links:
        assert ((link[0] == -1) | ((link[0] > np.arange(4)) & (link[0] < 4))).all()
    assert [link[1].tolist() for link in links] == [[1, 2, -1, -1], [-1, -1, 3, -1]]


def test_what_does_not_fit_is_named():
    parents, sizes = np.zeros((1, 4), np.int32), np.ones(1, np.int32)
    with pytest.raises(ValueError, match="sizes: dtype int64, expected int32"):
        tree_links(parents, sizes.astype(np.int64), out=(parents, parents))
    with pytest.raises(ValueError, match=r"next_sibling: shape \(4,\), expected \(1, 4\)"):
        tree_links(parents, sizes, out=(parents, parents[0]))
    wide = np.zeros((1, 1025), np.int32)
    with pytest.raises(ValueError, match="parents: 1025 nodes, expected at most 1024"):
        tree_links(wide, sizes, out=(wide, wide))
