"""The all-gather kernels on the CPU executor, ranks as launches that run together.

On a GPU: `test_kernel_all_reduce_streams.py`, where they follow and precede all-reduces.
"""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import all_reduce, simt
from ddtree_numba.kernels.all_gather import METHODS, all_gather, choose, launches
from ddtree_numba.kernels.all_reduce_call import EPOCH
from ddtree_numba.spec import all_gather as spec
from ddtree_numba.spec.all_reduce import all_reduce as sum_of
from ddtree_numba.spec.numerics import BF16, F32

from .test_kernel_all_reduce import assert_all, group, play, together, wide


def gathered(peers, parts, joined=False, method=None):
    """Every rank's result of one call."""
    outs = [np.zeros_like(spec.all_gather(parts, joined)) for _ in peers]
    ranks = zip(peers, parts, outs, strict=True)
    play([launches(x, each, out, method) for each, x, out in ranks])
    return outs


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_agrees_with_the_specification_on_every_rank(world, method, joined, rng):
    case = dict(ranks=world, T=5, n=12, dtype=np.dtype(F32), joined=joined)
    given = spec.inputs(case, rng)
    assert_all(gathered(group(world), **given, method=method), spec.all_gather(**given))


@pytest.mark.parametrize("name", [name for name in spec.CASES if not name.startswith("k26")])
def test_agrees_on_the_cases_of_the_specification(name, rng):
    given = spec.inputs(spec.CASES[name], rng)
    assert_all(gathered(group(len(given["parts"])), **given), spec.all_gather(**given))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_payload_beyond_the_room_goes_in_parts(method, joined, rng):
    """Parts end within rows."""
    given = spec.inputs(dict(ranks=3, T=7, n=12, dtype=np.dtype(F32), joined=joined), rng)
    peers, expected = group(3, size=80), spec.all_gather(**given)
    assert len(list(launches(given["parts"][0], peers[0], expected, method))) > 1
    assert_all(gathered(peers, **given, method=method), expected)


def test_calls_follow_each_other_and_sums(rng):
    """Lines, flags and pieces of other calls lie where a call looks for its own.

    The count of calls passes its end on the way.
    """
    peers = group(3, epoch=0xFFFFFFF8)
    for number in range(16):
        parts = wide(rng, 3, 1 + number * 5 % 7, 40)
        if number % 3:
            method, joined = METHODS[number // 2 % 2], number % 4 < 2
            outs = gathered(peers, parts, joined, method)
            assert_all(outs, spec.all_gather(parts, joined))
        else:
            method = all_reduce.METHODS[number // 3 % 4]
            assert_all(together(peers, parts, method), sum_of(parts))
    assert {int(each.control[EPOCH]) for each in peers} == {10}


@pytest.mark.parametrize("method", METHODS)
def test_a_wait_for_a_rank_that_never_comes_ends(method, rng):
    peers, x = group(3, limit=0, patience=16), wide(rng, 2, 8)
    outs = [np.zeros((3, 2, 8), BF16) for _ in range(2)]
    calls = [next(launches(x, peers[r], out, method)) for r, out in zip((0, 2), outs, strict=True)]
    simt.run_together([simt.Launch(k, grid, k.threads, a) for k, grid, a in calls])
    assert peers[0].failure() == "rank 0: rank 1 did not come within 0 s"
    assert peers[2].failure() == "rank 2: rank 1 did not come within 0 s"
    assert peers[1].failure() is None
    all_gather(x, peers[0], out=outs[0], method=method)  # does not wait


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_ends_a_wait(method, rng):
    peers, x = group(2, patience=16), wide(rng, 1, 48)
    peers[0].abort[0] = 1
    all_gather(x, peers[0], out=np.zeros((2, 1, 48), BF16), method=method)
    assert peers[0].failure() == "rank 0: its wait for rank 1 was aborted"


def test_what_does_not_fit_is_named():
    (peers, _), x = group(2), np.zeros((2, 12), BF16)
    for given, message in [
        (dict(out=np.zeros((3, 2, 12), BF16)), r"out: shape \(3, 2, 12\), expected \(2, 2, 12\)"),
        (dict(out=np.zeros((4, 12), BF16)), r"out: shape \(4, 12\), expected \(2, 24\)"),
        (dict(out=np.zeros((2, 24), F32)), "out: dtype float32, expected bfloat16"),
        (dict(x=np.zeros((2, 24), BF16)[:, ::2]), "x: not contiguous"),
        (
            dict(x=np.zeros((2, 2), BF16), out=np.zeros((2, 4), BF16)),
            "x: 4 bytes a row, no multiple of 8",
        ),
        (
            dict(x=np.zeros(2, BF16), out=np.zeros((2, 2), BF16)),
            "x: 4 bytes in all, no multiple of 8",
        ),
        (dict(method="pull"), "x: rows of 24 bytes cannot be pulled, no multiple of 16"),
        (dict(method="ring"), "method: 'ring', expected one of lines, pull"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            all_gather(**dict(x=x, peers=peers, out=np.zeros((2, 24), BF16)) | given)


def test_small_payloads_go_by_lines_and_large_ones_are_pulled():
    for world in range(2, 17):
        for link in all_reduce.LINKS:
            assert choose(world, 17 * 8, link) == "lines"
            assert choose(world, 17 * 4 * 163_840 // world, link) == "pull"
