"""Accepted rows into pages: page boundaries, overlap, poison elsewhere survives."""

import numpy as np
import pytest

from ddtree_numba.spec.cache_commit import CASES, cache_commit, inputs
from tests.cases import small

POISON = -999.0


def row_by_row(pages, scratch, page_table, starts, nodes, counts):
    """The commit from its definition, from copies."""
    pages, scratch = pages.copy(), scratch.copy()
    size = pages.shape[2]
    for r, count in enumerate(counts):
        for j in range(count):
            page, slot = divmod(int(starts[r]) + j, size)
            pages[:, page_table[r, page], slot] = scratch[:, r, nodes[r, j]]
    return pages


def bits(x):
    return x.view(np.uint16 if x.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("name", small(CASES))
def test_writes_the_named_rows_and_nothing_else(name):
    arguments = inputs(CASES[name], np.random.default_rng(0))
    expected, scratch = row_by_row(**arguments), arguments["scratch"].copy()
    cache_commit(**arguments)
    assert np.array_equal(bits(arguments["pages"]), bits(expected))
    assert np.array_equal(bits(arguments["scratch"]), bits(scratch))
    written = ~np.isnan(expected.astype(np.float32)).any(axis=(0, 3))
    assert written.sum() == sum(CASES[name]["counts"])


@pytest.mark.parametrize("count", [1, 2, 17, 33, 65])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 31, 32])
def test_s29_page_boundaries_equal_a_contiguous_cache(start, count):
    rng = np.random.default_rng(start * 100 + count)
    owned = -(-(start + count) // 16)
    table = 1 + rng.permutation(owned).astype(np.int32)[None]
    pages = np.full((2, owned + 2, 16, 3), np.nan, np.float32)
    contiguous = np.full((2, owned * 16, 3), np.nan, np.float32)
    contiguous[:, :start] = rng.standard_normal((2, start, 3))
    pages[:, table[0]] = contiguous.reshape(2, owned, 16, 3)
    scratch = rng.standard_normal((2, 1, 70, 3)).astype(np.float32)
    nodes = np.sort(rng.permutation(70)[:count])[None]
    cache_commit(pages, scratch, table, np.array([start]), nodes, np.array([count]))
    contiguous[:, start : start + count] = scratch[:, 0, nodes[0]]
    gathered = pages[:, table[0]].reshape(2, owned * 16, 3)
    assert np.array_equal(gathered, contiguous, equal_nan=True)
    assert np.isfinite(gathered[:, : start + count]).all()
    assert np.isnan(pages[:, [0, owned + 1]]).all(), "pages of nobody"


@pytest.mark.parametrize("path", [[0, 3, 9, 20], [0, 1, 2, 3], [0, 2, 3, 4], [1, 0, 3, 2]])
def test_s29_overlapping_source_and_destination(path):
    """The scratch may view the rows that are written: all sources are read before any write."""
    pages = np.arange(2 * 1 * 32 * 3, dtype=np.float32).reshape(2, 1, 32, 3)
    before = pages.copy()
    nodes, count = np.array([path]), np.array([4])
    cache_commit(pages, pages[:, :, 4:], np.zeros((1, 1), int), np.array([4]), nodes, count)
    expected = before.copy()
    expected[:, 0, 4:8] = before[:, 0, 4:][:, path]
    assert np.array_equal(pages, expected)


def test_any_row_shape_and_dtype():
    pages = np.full((1, 2, 4, 2, 3), 9, np.int8)
    scratch = np.arange(30, dtype=np.int8).reshape(1, 1, 5, 2, 3)
    cache_commit(pages, scratch, np.array([[1]]), np.array([2]), np.array([[0, 4]]), np.array([2]))
    assert np.array_equal(pages[0, 1, 2:], scratch[0, 0, [0, 4]]) and np.all(pages[0, 0] == 9)


def test_a_request_does_not_depend_on_its_company():
    arguments = inputs(CASES["unequal"], np.random.default_rng(1))
    alone = {name: value.copy() for name, value in arguments.items()}
    cache_commit(**arguments)
    alone["scratch"] = alone["scratch"][:, 1:2]
    for name in ("page_table", "starts", "nodes", "counts"):
        alone[name] = alone[name][1:2]
    cache_commit(**alone)
    own = alone["page_table"][0]
    assert np.array_equal(bits(alone["pages"][:, own]), bits(arguments["pages"][:, own]))


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(page_table=np.array([[1, -1, 3], [4, 5, 6]])), r"page_table\[0, 1\]"),
        (dict(page_table=np.array([[1, 7, 3], [4, 5, 6]])), r"page_table\[0, 1\]"),
        (dict(page_table=np.array([[1], [4]])), "page_table"),
        (dict(nodes=np.array([[0, 9, 1], [0, 1, 2]])), r"nodes\[0, 1\]"),
        (dict(nodes=np.array([[0, 1, 2], [-1, 1, 2]])), r"nodes\[1, 0\]"),
        (dict(nodes=np.array([0, 1, 2])), "nodes"),
        (dict(counts=np.array([4, 1])), "counts"),
        (dict(counts=np.array([-1, 1])), "counts"),
        (dict(starts=np.array([-1, 1])), "starts"),
        (dict(starts=np.array([1])), "starts"),
        (dict(scratch=np.zeros((1, 2, 5, 4), np.float32)), "scratch"),
        (dict(scratch=np.zeros((1, 2, 5, 3), np.float16)), "scratch"),
    ],
)
def test_s29_bad_arguments_are_refused_before_anything_is_written(change, name):
    pages = np.full((1, 7, 4, 3), POISON, np.float32)
    arguments = dict(
        pages=pages,
        scratch=np.ones((1, 2, 5, 3), np.float32),
        page_table=np.array([[1, 2, 3], [4, 5, 6]]),
        starts=np.array([3, 1]),
        nodes=np.array([[0, 1, 4], [0, 2, 3]]),
        counts=np.array([3, 2]),
    )
    with pytest.raises(ValueError, match=f"^{name} "):
        cache_commit(**arguments | change)
    assert np.all(pages == POISON)
    cache_commit(**arguments)
    assert np.sum(pages != POISON) == 5 * 3
