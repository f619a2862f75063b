"""The commit kernel: its specification's bits, views, rows that have no place, far offsets."""

import numba
import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.cache_commit import cache_commit, element_at
from ddtree_numba.spec import cache_commit as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.cases import small
from tests.gpu_arrays import to_gpu, to_host

POISON = -999.0


def given_of(case, rng):
    given = spec.inputs(case, rng)
    return given | {name: given[name].astype(np.int32) for name in ("starts", "nodes", "counts")}


def bits(x):
    return x.view(np.uint16 if x.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("name", small(spec.CASES))
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_equals_the_specification(name, dtype, rng):
    given = given_of(spec.CASES[name], rng)
    given |= {name: given[name].astype(dtype) for name in ("pages", "scratch")}
    expected = given["pages"].copy()
    spec.cache_commit(**given | dict(pages=expected))
    cache_commit(**given)
    assert given["pages"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("start, count", [(0, 1), (15, 2), (16, 17), (17, 33), (1, 65), (0, 16)])
def test_s29_page_boundaries(start, count, rng):
    case = dict(layers=2, page=16, starts=[start], counts=[count], nodes=70, width=8)
    given = given_of(case, rng)
    expected = given["pages"].copy()
    spec.cache_commit(**given | dict(pages=expected))
    cache_commit(**given)
    assert given["pages"].tobytes() == expected.tobytes()


def test_the_scratch_may_be_a_view_of_a_larger_one(rng):
    """Fewer requests and nodes than the buffer has, as in a step below the full batch."""
    given = given_of(spec.CASES["unequal"], rng)
    expected = given["pages"].copy()
    spec.cache_commit(**given | dict(pages=expected))
    layers, requests, nodes, width = given["scratch"].shape
    area = np.full((layers, requests + 2, nodes + 7, width), np.nan, BF16)
    area[:, :requests, :nodes] = given["scratch"]
    cache_commit(**given | dict(scratch=area[:, :requests, :nodes]))
    assert given["pages"].tobytes() == expected.tobytes()


def test_rows_of_more_than_one_axis(rng):
    """The drafter's context: keys and values of several heads."""
    pages = np.full((1, 3, 16, 2, 2, 8), POISON, F32)
    scratch = rng.standard_normal((1, 1, 4, 2, 2, 8)).astype(F32)
    whole = np.int32([[0, 1, 2, 3]])
    arguments = np.int32([[2, 1]]), np.int32([14]), whole, np.int32([4])
    cache_commit(pages, scratch, *arguments)
    assert pages[0, 2, 14:].tobytes() == scratch[0, 0, :2].tobytes()
    assert pages[0, 1, :2].tobytes() == scratch[0, 0, 2:].tobytes()
    assert np.sum(pages != POISON) == scratch.size


@pytest.mark.parametrize(
    "change, written",
    [
        (dict(page_table=[[1, -1, 3], [4, 5, 6]]), 3),
        (dict(page_table=[[1, 7, 3], [4, 5, 6]]), 3),
        (dict(page_table=[[1], [4]]), 3),
        (dict(nodes=[[0, 9, 1], [0, 1, 2]]), 4),
        (dict(nodes=[[0, 1, 2], [-1, 1, 2]]), 4),
        (dict(starts=[-1, 1]), 4),
    ],
)
def test_a_row_without_a_place_is_left_out(change, written):
    """What the specification refuses by name; here nothing else may be touched."""
    given = dict(
        page_table=[[1, 2, 3], [4, 5, 6]],
        starts=[3, 1],
        nodes=[[0, 1, 4], [0, 2, 3]],
        counts=[3, 2],
    )
    given = {name: np.int32(value) for name, value in (given | change).items()}
    pages = np.full((1, 7, 4, 4), POISON, F32)
    cache_commit(pages, np.ones((1, 2, 5, 4), F32), **given)
    assert np.sum(pages != POISON) == written * 4


def test_a_request_does_not_depend_on_its_company(rng):
    given = given_of(spec.CASES["unequal"], rng)
    together = given["pages"].copy()
    cache_commit(**given | dict(pages=together))
    for r in range(3):
        alone = given["pages"].copy()
        part = {n: given[n][r : r + 1] for n in ("page_table", "starts", "nodes", "counts")}
        cache_commit(alone, given["scratch"][:, r : r + 1], **part)
        own = given["page_table"][r]
        assert np.array_equal(bits(alone[:, own]), bits(together[:, own]))


def test_m07_offsets_of_the_largest_cache_have_64_bits():
    """The index function with the kernel's types, compiled; 61 layers of 16,384 pages."""
    wide = numba.njit("int64(int32,int64,int32,int64,int32,int64)")(element_at.py_func)
    layer, page = 16_384 * 64 * 576, 64 * 576
    for place in ((60, 16_383, 63), (0, 16_383, 63), (60, 0, 0)):
        expected = place[0] * layer + place[1] * page + place[2] * 576
        assert wide(place[0], layer, place[1], page, place[2], 576) == expected
    assert wide(60, layer, 16_383, page, 63, 576) > 2**35


def test_shapes_and_dtypes_that_do_not_fit_are_named(rng):
    good = given_of(spec.CASES["page_boundary"], rng)
    for name, value, message in (
        ("starts", good["starts"].astype(np.int64), "starts: dtype int64, expected int32"),
        ("counts", good["counts"][:1], r"counts: shape \(1,\), expected \(3,\)"),
        ("scratch", good["scratch"].astype(F32), "scratch: dtype float32, expected bfloat16"),
        ("scratch", good["scratch"][1:], "scratch: shape"),
        ("scratch", good["scratch"][..., ::2], "scratch: shape"),
        ("pages", good["pages"][:, ::2], "pages: not contiguous"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            cache_commit(**good | {name: value})
    thin = {name: good[name][..., :4].copy() for name in ("pages", "scratch")}
    with pytest.raises(ValueError, match="pages: rows of 4, expected a multiple of 8"):
        cache_commit(**good | thin)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        spec.CASES["k26"],
        dict(
            layers=61,
            page=64,
            starts=[63 + r for r in range(16)],
            counts=[8] * 16,
            nodes=65,
            width=576,
        ),
        dict(layers=6, page=64, starts=[5, 4000], counts=[512, 300], nodes=512, width=256),
    ],
    ids=["k26", "16_requests", "drafter_prefill"],
)
def test_gpu_equals_the_specification(case, rng):
    given = given_of(case, rng)
    device = to_gpu(given)
    cache_commit(**device)
    spec.cache_commit(**given)
    assert to_host(device["pages"]).tobytes() == given["pages"].tobytes()


@pytest.mark.gpu
def test_m07_gpu_the_last_page_of_a_large_pool(rng):
    """9.7 GB of pages: element offsets beyond 2**32."""
    import cupy

    layers, pool, width = 61, 2_160, 576
    bits = cupy.zeros((layers, pool, 64, width), np.uint16)
    assert bits.size > 2**32
    scratch = rng.standard_normal((layers, 1, 2, width)).astype(BF16)
    table, start = np.int32([[pool - 1]]), np.int32([62])
    arguments = to_gpu((scratch, table, start, np.int32([[0, 1]]), np.int32([2])))
    cache_commit(bits.view(BF16), *arguments)
    assert to_host(bits[:, pool - 1, 62:]).tobytes() == scratch[:, 0].tobytes()
    bits[:, pool - 1, 62:] = 0
    assert not cupy.any(bits)
