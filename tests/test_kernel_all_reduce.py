"""The all-reduce kernels on the CPU executor, ranks as launches that run together.

On a GPU: `test_kernel_all_reduce_streams.py`; between processes: `test_multi_gpu.py`.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import simt
from ddtree_numba.kernels.all_reduce import LINKS, METHODS, all_reduce, choose, launches
from ddtree_numba.kernels.all_reduce_call import CONTROL_WORDS, EPOCH
from ddtree_numba.kernels.peers import Peers, Room
from ddtree_numba.spec import all_reduce as spec
from ddtree_numba.spec.numerics import BF16, F32


def group(world, size=1024, epoch=0, **options):
    """Ranks whose regions are arrays of this process."""
    room = Room.of(world, size, size, size)
    regions = tuple(np.zeros(room.words, np.uint32) for _ in range(world))
    made, abort = [], np.zeros(1, np.uint32)
    for rank in range(world):
        control = np.zeros(CONTROL_WORDS, np.uint32)
        control[EPOCH] = epoch
        made.append(Peers(rank, regions, room, control, abort, **options))
    return made


def together(peers, partials, method=None, outs=None):
    """Every rank's result of one call."""
    outs = [np.empty_like(x) for x in partials] if outs is None else outs
    ranks = zip(peers, partials, outs, strict=True)
    play([launches(x, each, out, method) for each, x, out in ranks])
    return outs


def play(calls):
    """The launches of every rank's call, those of one part at a time."""
    for part in zip(*calls, strict=True):
        simt.run_together([simt.Launch(k, grid, k.threads, a) for k, grid, a in part])


def wide(rng, *shape, dtype=BF16):
    """Exponents of 6 bits: the order of a sum shows."""
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-32, 32, shape))).astype(dtype)


def assert_all(outs, expected):
    for rank, out in enumerate(outs):
        assert out.tobytes() == expected.tobytes(), f"rank {rank}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_agrees_with_the_specification_on_every_rank(world, method, rng):
    partials = wide(rng, world, 5, 48)
    assert_all(together(group(world), partials, method), spec.all_reduce(partials))


@pytest.mark.parametrize("name", ["one_rank", "two_ranks", "no_row", "eight_ranks"])
def test_agrees_on_the_cases_of_the_specification(name, rng):
    case = spec.CASES[name]
    given = spec.inputs(case | dict(T=min(case["T"], 4)), rng)["partials"]
    outs = together(group(len(given), size=2048), given)
    assert_all(outs, spec.all_reduce(given))


@pytest.mark.parametrize("method", METHODS)
def test_float32(method, rng):
    partials = wide(rng, 3, 4, 12, dtype=F32)
    assert_all(together(group(3), partials, method), spec.all_reduce(partials))


@pytest.mark.parametrize("method", METHODS)
def test_the_order_is_that_of_the_ranks(method, rng):
    partials = np.ones((8, 1, 64), BF16)
    partials[:2] = 1e30 * np.array([1, -1]).reshape(2, 1, 1)
    assert_all(together(group(8), partials, method), np.full((1, 64), 6, BF16))
    assert_all(together(group(8), partials[::-1], method), np.zeros((1, 64), BF16))


def test_a_row_has_the_same_bits_alone_by_every_method(rng):
    partials = wide(rng, 3, 2, 40)
    expected = together(group(3), partials, "lines")[0]
    for method in METHODS:
        for i in range(2):
            outs = together(group(3), partials[:, i : i + 1].copy(), method)
            assert_all(outs, expected[i : i + 1])


def test_calls_of_all_methods_and_sizes_follow_each_other(rng):
    """Lines and flags of earlier calls, larger ones among them, lie where a call looks for its own.

    The count of calls passes its end on the way: 0 is what untouched memory holds.
    """
    peers = group(3, epoch=0xFFFFFFF8)
    for number in range(12):
        partials = wide(rng, 3, 1 + number * 5 % 7, 40)
        outs = together(peers, partials, METHODS[number * 3 % 8 // 2])
        assert_all(outs, spec.all_reduce(partials))
    assert {int(each.control[EPOCH]) for each in peers} == {6}


def test_half_a_line_is_not_taken(rng):
    """Its first half has arrived, the second is of an earlier call."""
    peers, partials = group(2, epoch=6), wide(rng, 2, 1, 8)
    half = peers[0].room.lines * 4
    for each in peers:
        lines = each.regions[each.rank][half : 2 * half].reshape(-1, 4)
        lines[:] = 0xDEAD, 7, 0xDEAD, 5
    assert_all(together(peers, partials, "lines"), spec.all_reduce(partials))


@pytest.mark.parametrize("method", METHODS)
def test_a_payload_beyond_the_room_goes_in_parts(method, rng):
    partials = wide(rng, 3, 7, 40)
    peers = group(3, size=240)
    assert len(list(launches(partials[0], peers[0], partials[0], method))) > 1
    assert_all(together(peers, partials, method), spec.all_reduce(partials))


@pytest.mark.parametrize("method", METHODS)
def test_works_in_place(method, rng):
    partials = wide(rng, 3, 5, 48)
    expected = spec.all_reduce(partials)
    assert_all(together(group(3), partials, method, outs=list(partials)), expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_negative_zero_and_a_nan_stay(method):
    partials = np.full((2, 1, 8), -0.0, BF16)
    partials[1, 0, 3] = np.nan
    for out in together(group(2), partials, method):
        assert np.isnan(out[0, 3].astype(F32))
        assert (np.delete(out.view(np.uint16), 3) == 0x8000).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_wait_for_a_rank_that_never_comes_ends(method, rng):
    peers, partials = group(3, limit=0, patience=16), wide(rng, 3, 1, 48)
    outs = [np.empty_like(x) for x in partials]
    calls = [next(launches(partials[r], peers[r], outs[r], method)) for r in (0, 2)]
    simt.run_together([simt.Launch(k, grid, k.threads, a) for k, grid, a in calls])
    assert peers[0].failure() == "rank 0: rank 1 did not come within 0 s"
    assert peers[2].failure() == "rank 2: rank 1 did not come within 0 s"
    assert peers[1].failure() is None
    all_reduce(partials[0], peers[0], out=outs[0], method=method)  # does not wait


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_ends_a_wait(method, rng):
    peers, x = group(2, patience=16), wide(rng, 1, 48)
    peers[0].abort[0] = 1
    all_reduce(x, peers[0], out=np.empty_like(x), method=method)
    assert peers[0].failure() == "rank 0: its wait for rank 1 was aborted"


def test_what_does_not_fit_is_named():
    (peers, _), x = group(2), np.zeros((1, 8), BF16)
    for given, message in [
        (dict(x=x[:, :4].copy()), "x: 8 bytes, expected a multiple of 16"),
        (dict(out=np.zeros((2, 8), BF16)), r"out: shape \(2, 8\), expected \(1, 8\)"),
        (dict(out=np.zeros((1, 8), F32)), "out: dtype float32, expected bfloat16"),
        (dict(x=x.astype(np.float64)), "x: dtype float64, expected bfloat16 or float32"),
        (dict(method="ring"), "method: 'ring', expected one of lines, lines_two_shot, pull"),
    ]:
        with pytest.raises(ValueError, match=message):
            given = dict(x=x, peers=peers) | given
            all_reduce(**dict(out=given["x"]) | given)
    with pytest.raises(ValueError, match="regions: 17 ranks, from 1 to 16 are possible"):
        replace(peers, regions=17 * peers.regions[:1])
    with pytest.raises(ValueError, match="rank: 2 of 2"):
        replace(peers, rank=2)
    with pytest.raises(ValueError, match="blocks: 257, from 1 to 256 are possible"):
        replace(peers, blocks=257)
    with pytest.raises(ValueError, match=r"region: shape \(8,\), expected"):
        replace(peers, regions=(peers.regions[0][:8], peers.regions[1]))


@pytest.mark.parametrize("link", LINKS)
def test_small_payloads_go_by_lines_and_large_ones_are_pulled(link):
    for world in range(2, 17):
        assert choose(world, 16, link) == "lines"
        assert choose(world, 1 << 26, link).startswith("pull")


def test_the_choice_is_what_was_measured_between_two_gpus():
    chosen = [choose(2, rows * 7168 * 2) for rows in (1, 9, 17, 33, 65, 512)]
    assert chosen == 4 * ["lines"] + 2 * ["pull"]
