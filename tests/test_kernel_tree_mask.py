"""Ancestor bits, paths and positions: the specification's bits at any size; bounded walks."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.tree_mask import tree_mask, tree_paths
from ddtree_numba.spec import tree_mask as spec
from tests.gpu_arrays import to_gpu

PLACES = [pytest.param(False, id="cpu"), pytest.param(True, id="gpu", marks=pytest.mark.gpu)]
ENGINE = {
    f"{n}_nodes_of_64": dict(nodes=n, sizes=[n, n - 1, n // 2, 1] * 16) for n in (65, 129, 257)
}


def depths_of(parents, sizes):
    depths = np.full_like(parents, -999)  # padding must not be read
    for r, size in enumerate(sizes):
        for i in range(size):
            depths[r, i] = depths[r, parents[r, i]] + 1 if i else 0
    return depths


def poisoned(shape, dtype):
    return np.full(shape, 77, dtype)


def all_three(parents, depths, sizes, starts, width, gpu=False):
    """(paths, positions, words) of one launch."""
    shape = parents.shape
    words = poisoned((*shape, -(-shape[1] // 64)), np.uint64)
    given = (parents, depths, sizes, starts, poisoned((*shape, width), np.int32))
    given = *given, poisoned(shape, np.int32), words
    if gpu:
        given = to_gpu(given)
    parents, depths, sizes, starts, paths, positions, words = given
    more = dict(starts=starts, positions=positions, words=words)
    assert tree_paths(parents, depths, sizes, out=paths, **more) is paths
    return [x.get() if gpu else x for x in (paths, positions, words)]


def assert_as_specified(parents, sizes, starts, width, gpu=False):
    depths = depths_of(parents, sizes)
    paths, positions, words = all_three(parents, depths, sizes, starts, width, gpu)
    assert words.tobytes() == spec.tree_mask(parents, sizes).tobytes()
    assert paths.tobytes() == spec.tree_paths(parents, depths, sizes, width).tobytes()
    real = np.arange(parents.shape[1]) < sizes[:, None]
    assert np.array_equal(positions, starts[:, None] + np.where(real, depths, 0))


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize("name", spec.CASES)
def test_s25_equals_the_specification(name, gpu, rng):
    given = spec.inputs(spec.CASES[name], rng)
    starts = rng.integers(0, 1 << 18, len(given["sizes"]), np.int32)
    deepest = depths_of(**given).max()
    assert_as_specified(**given, starts=starts, width=deepest + 1 + rng.integers(0, 3), gpu=gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize("name", ENGINE)
def test_more_than_1200_rows(name, shape, rng):
    given = spec.inputs(ENGINE[name] | dict(shape=shape), rng)
    starts = rng.integers(0, 1 << 18, 64, np.int32)
    width = depths_of(**given).max() + 1
    assert_as_specified(**given, starts=starts, width=width, gpu=True)


@pytest.mark.parametrize("name", ["unequal", "random_of_129"])
def test_words_alone_and_paths_alone(name, rng):
    given = spec.inputs(spec.CASES[name], rng)
    expected, depths = spec.tree_mask(**given), depths_of(**given)
    words = tree_mask(**given, out=np.empty_like(expected))
    assert words.tobytes() == expected.tobytes()
    expected = spec.tree_paths(depths=depths, **given)
    paths = tree_paths(depths=depths, **given, out=np.empty_like(expected))
    assert paths.tobytes() == expected.tobytes()


def test_a_request_does_not_depend_on_its_company(rng):
    given = spec.inputs(dict(nodes=70, sizes=[70, 40, 3]), rng)
    together = tree_mask(**given, out=np.empty((3, 70, 2), np.uint64))
    for r in range(3):
        one = {name: value[r : r + 1] for name, value in given.items()}
        alone = tree_mask(**one, out=np.empty((1, 70, 2), np.uint64))
        assert alone.tobytes() == together[r].tobytes()


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize(
    "parents",
    [[-1, 0, 5, 2], [-1, 2, 1, 0], [0, 0, 1, 2], [-1, -1, -1, -1], [3, 3, 3, 3], [-9, 7, 9, -5]],
)
def test_s22_malformed_trees_end_and_touch_nobody_else(parents, gpu):
    """Missing parents, cycles, two roots, in one of two requests; its depths are wrong too."""
    both = np.array([parents, [-1, 0, 1, 1]], np.int32)
    sizes, starts = np.array([4, 4], np.int32), np.array([5, 9], np.int32)
    for depth in (-3, 0, 2, 77):
        depths = np.array([[depth] * 4, [0, 1, 2, 2]], np.int32)
        paths, positions, words = all_three(both, depths, sizes, starts, 3, gpu)
        assert words[1, :, 0].tolist() == [1, 3, 7, 11]
        assert paths[1].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 3]]
        assert positions[1].tolist() == [9, 10, 11, 11]
        assert (words[0, :, 0] < 16).all() and (
            words[0, :, 0] >> np.arange(4, dtype="u8") & 1
        ).all()
        assert ((paths[0] >= -1) & (paths[0] < 4)).all()


def test_what_does_not_fit_is_named():
    parents, sizes = np.zeros((1, 4), np.int32), np.ones(1, np.int32)
    with pytest.raises(ValueError, match="parents: dtype int64, expected int32"):
        tree_mask(parents.astype(np.int64), sizes, out=np.zeros((1, 4, 1), np.uint64))
    with pytest.raises(ValueError, match=r"words: shape \(1, 4, 2\), expected \(1, 4, 1\)"):
        tree_mask(parents, sizes, out=np.zeros((1, 4, 2), np.uint64))
    with pytest.raises(ValueError, match="parents: 1025 nodes, expected at most 1024"):
        tree_mask(np.zeros((1, 1025), np.int32), sizes, out=np.zeros((1, 1025, 17), np.uint64))
    out = np.zeros((1, 4, 3), np.int32)
    with pytest.raises(ValueError, match="starts and positions: one without the other"):
        tree_paths(parents, parents, sizes, out=out, starts=sizes)
    with pytest.raises(ValueError, match=r"depths: shape \(4,\), expected \(1, 4\)"):
        tree_paths(parents, parents[0], sizes, out=out)
