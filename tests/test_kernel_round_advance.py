"""The end of a round on the device: its specification's integers, in place."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.round_advance import round_advance
from ddtree_numba.spec import round_advance as spec
from tests.gpu_arrays import to_gpu

PLACES = [pytest.param(False, id="cpu"), pytest.param(True, id="gpu", marks=pytest.mark.gpu)]
STATE = ("roots", "starts", "room")
ROWS = (*STATE, "tree_tokens", "nodes", "counts", "next_tokens")


def advanced(given, gpu=False):
    """tokens, roots, starts, room after the kernel; what was given stays as it is."""
    arrays = {name: value.copy() for name, value in given.items()}
    out = np.full(given["nodes"].shape, 77, np.int32)
    if gpu:
        arrays, out = to_gpu(arrays), to_gpu(out)
    assert round_advance(**arrays, out=out) is out
    results = [out, *(arrays[name] for name in STATE)]
    return [x.get() if gpu else x for x in results]


def specified(given):
    arrays = {name: value.copy() for name, value in given.items()}
    tokens = spec.round_advance(**arrays)
    return [tokens, *(arrays[name] for name in STATE)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("gpu", PLACES)
@pytest.mark.parametrize("name", spec.CASES)
def test_equals_the_specification(name, gpu, rng):
    given = spec.inputs(spec.CASES[name], rng)
    assert_equal(advanced(given, gpu), specified(given))


@pytest.mark.parametrize("gpu", PLACES)
def test_s12_without_a_next_token_the_root_stays(gpu, rng):
    given = spec.inputs(spec.CASES["unequal"], rng)
    given["next_tokens"][:] = -1
    tokens, roots, starts, _ = advanced(given, gpu)
    assert roots.tolist() == given["roots"].tolist()
    assert starts.tolist() == (given["starts"] + given["counts"]).tolist()
    assert np.count_nonzero(tokens >= 0) == 2 + 7


def test_a_request_does_not_depend_on_its_company(rng):
    given = spec.inputs(spec.CASES["unequal"], rng)
    together = advanced(given)
    for r in range(len(given["counts"])):
        alone = advanced({name: given[name][r : r + 1] for name in ROWS})
        assert_equal(alone, [x[r : r + 1] for x in together])


def test_m01_a_node_outside_of_the_tree_is_not_read(rng):
    """What the specification refuses by name; here it reports -1."""
    given = spec.inputs(spec.CASES["full_path"], rng)
    given["nodes"][0, 1:4] = [-1, 5, 1 << 30]
    tokens = advanced(given)[0]
    expected = given["tree_tokens"][0, given["nodes"][0, 4]]
    assert tokens[0].tolist() == [-1, -1, -1, expected, given["next_tokens"][0]]


def test_what_does_not_fit_is_named(rng):
    good = spec.inputs(spec.CASES["unequal"], rng)
    for name, value, message in (
        ("room", good["room"][:2], r"room: shape \(2,\), expected \(4,\)"),
        ("counts", good["counts"].astype(np.int64), "counts: dtype int64, expected int32"),
        (
            "tree_tokens",
            good["tree_tokens"][:3],
            r"tree_tokens: shape \(3, 17\), expected \(4, 17\)",
        ),
        ("nodes", good["nodes"].astype(np.int64), "nodes: dtype int64, expected int32"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            advanced(good | {name: value})
