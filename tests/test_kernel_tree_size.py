"""A tree's size on the device: the specification's integers."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.tree_size import tree_size
from ddtree_numba.spec import tree_size as spec
from tests.gpu_arrays import to_gpu, to_host

PLACES = [pytest.param(False, id="cpu"), pytest.param(True, id="gpu", marks=pytest.mark.gpu)]


def sizes_of(given, gpu=False):
    out = np.full(len(given["sizes"]), 77, np.int32)
    if gpu:
        given, out = to_gpu(given), to_gpu(out)
    assert tree_size(**given, out=out) is out
    return to_host(out) if gpu else out


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize("name", spec.CASES)
def test_equals_the_specification(name, gpu, rng):
    given = spec.inputs(spec.CASES[name], rng)
    assert sizes_of(given, gpu).tolist() == spec.tree_size(**given).tolist()


@pytest.mark.parametrize("gpu", PLACES)
def test_trees_that_end_at_and_around_each_turn_of_the_warp(gpu, rng):
    """Rows are free up to a node, and then dear."""
    given = spec.inputs(dict(sizes=[97] * 8, N=97, slope=0.0), rng)
    for end in (1, 2, 31, 32, 33, 34, 64, 65, 96, 97):
        given["seconds"] = np.where(np.arange(97) < end, 1.0, 1e6)
        assert sizes_of(given, gpu).tolist() == [end] * 8 == spec.tree_size(**given).tolist()


@pytest.mark.parametrize("gpu", PLACES)
def test_an_impossible_node_is_never_added(gpu):
    scores = np.array([[0, -0.5, -np.inf, -np.inf]], np.float32)
    given = dict(scores=scores, sizes=np.array([4], np.int32), seconds=np.ones(4))
    assert sizes_of(given, gpu).tolist() == [2]


def test_what_does_not_fit_is_named(rng):
    good = spec.inputs(spec.CASES["unequal"], rng)
    for name, value, message in (
        ("sizes", good["sizes"].astype(np.int64), "sizes: dtype int64, expected int32"),
        ("seconds", good["seconds"][:9], r"seconds: shape \(9,\), expected \(65,\)"),
        ("scores", good["scores"].astype(float), "scores: dtype float64, expected float32"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            sizes_of(good | {name: value})
