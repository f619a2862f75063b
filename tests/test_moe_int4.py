"""INT4 experts against a dense float64 loop, odd distributions, slices of ranks."""

import numpy as np
import pytest

from ddtree_numba.spec.all_reduce import all_reduce
from ddtree_numba.spec.moe_int4 import CASES, inputs, moe_int4
from ddtree_numba.spec.numerics import BF16, F32, Int4Matrix, bf16, matvec, pack_int4, unpack_int4
from tests.cases import small


def weights_of(matrix: Int4Matrix) -> np.ndarray:
    """float64[E, N, K], unpacked value by value."""
    count, rows, words = matrix.packed.shape
    words = matrix.packed.astype(np.int64)[..., None] >> (4 * np.arange(8))
    values = (words & 15).reshape(count, rows, -1)[..., : matrix.shape[1]] - 8
    scale = np.repeat(matrix.scale.astype(F32), 32, axis=-1)[..., : matrix.shape[1]]
    return bf16(values.astype(F32) * scale).astype(np.float64)


def dense(x, experts, weights, gate_up, down, base=None):
    """Every token through all of its picks in float64; only the hidden row is rounded."""
    gate_up, down, dtype = weights_of(gate_up), weights_of(down), x.dtype
    out = np.zeros(x.shape) if base is None else base.astype(np.float64)
    for row, (picks, shares) in enumerate(zip(experts, weights, strict=True)):
        for expert, share in zip(picks, shares, strict=True):
            if expert >= 0:
                gate, up = np.split(gate_up[expert] @ x[row].astype(np.float64), 2)
                hidden = (gate / (1 + np.exp(-gate)) * up).astype(dtype).astype(np.float64)
                out[row] += share * (down[expert] @ hidden)
    return out


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_a_dense_loop(name, dtype, rng):
    given = inputs(CASES[name], rng)
    given["x"] = given["x"].astype(dtype)
    out = moe_int4(**given)
    assert out.dtype == dtype
    tolerance = dict(rtol=2**-7, atol=4e-3) if dtype == BF16 else dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.astype(np.float64), dense(**given), **tolerance)


def test_e08_odd_distributions_and_repeats(rng):
    """All to one expert, one and 64 rows, one token, none: the loop's numbers, ten times over."""
    for name in ("all_to_one", "all_to_the_last", "lopsided", "mostly_empty", "one_row", "no_row"):
        given = inputs(CASES[name], rng)
        first = moe_int4(**given)
        assert np.isfinite(first.astype(F32)).all()
        for _ in range(9):
            assert moe_int4(**given).tobytes() == first.tobytes()


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_e08_a_token_has_the_same_bits_in_any_company(dtype, rng):
    given = inputs(dict(T=65, k=4, E=12, H=64, I=32, base=True), rng)
    given["x"] = given["x"].astype(dtype)
    rows = ("x", "experts", "weights", "base")
    together = moe_int4(**given)
    for part in ([0], [64], [3, 4, 5], list(range(1, 65)), list(rng.permutation(65))):
        alone = moe_int4(**given | {name: given[name][part] for name in rows})
        assert alone.tobytes() == together[part].tobytes()
    crowd = given["experts"].copy()
    crowd[1:] = crowd[0]  # everybody joins the first token's experts
    assert moe_int4(**given | {"experts": crowd})[0].tobytes() == together[0].tobytes()


def test_e08_picks_are_summed_in_their_order():
    """Weights 1, 2^30, -2^30 over equal experts: only the order says whether the 1 survives."""
    one = np.zeros((3, 64, 32), np.int8)
    one[:, [0, 32], 0] = 1  # gate and up read x[0]
    gate_up = Int4Matrix(pack_int4(one), bf16(np.ones((3, 64, 1))), (64, 32))
    down = Int4Matrix(pack_int4(one[:, :32]), bf16(np.ones((3, 32, 1))), (32, 32))
    x = np.zeros((1, 32), F32)
    x[0, 0] = 32  # silu(32) is 32 in float32
    big = F32.type(2**30)

    def total(shares, experts):
        picks = np.array([experts], np.int32)
        return moe_int4(x, picks, np.array([shares], F32), gate_up, down)[0, 0] / 1024

    assert total([1, big, -big], [0, 1, 2]) == total([1, big, -big], [2, 1, 0]) == 0
    assert total([big, -big, 1], [0, 1, 2]) == total([big, -big, 1], [2, 0, 1]) == 1


def test_m01_padding_picks_read_nothing(rng):
    given = inputs(CASES["padding"], rng)
    given["x"][-2:], given["weights"][-2:] = np.nan, np.nan
    out = moe_int4(**given).astype(F32)
    assert not out[-2:].any() and np.isfinite(out).all()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_e06_the_shared_expert_counts_once(ranks):
    """Routed 0, shared 1: its slices are added to each rank's partial sum before the reduction."""
    nothing = np.zeros((1, 2), np.int32) - 1
    zero = Int4Matrix(np.zeros((1, 64, 8), np.int32), bf16(np.zeros((1, 64, 2))), (64, 64))
    down = Int4Matrix(zero.packed[:, :, :4], zero.scale[:, :, :1], (64, 32))
    x, shares = bf16(np.ones((1, 64))), np.ones((1, 2), F32)
    slices = bf16(np.full((ranks, 1, 64), 1 / ranks))
    parts = [moe_int4(x, nothing, shares, zero, down, base=part) for part in slices]
    assert np.array_equal(all_reduce(np.stack(parts)), np.ones((1, 64)))


def test_l05_scales_are_cut_with_the_packed_words():
    """All values 1, scales 1 and 10: two ranks sum to 32 + 320; shared scales give 64 or 640."""
    packed = pack_int4(np.ones((1, 2, 64), np.int8))
    scale = bf16(np.array([[[1.0, 10.0]] * 2]))
    x = np.ones((1, 64), F32)
    parts = []
    for rank in range(2):
        words, groups = slice(4 * rank, 4 * rank + 4), slice(rank, rank + 1)
        share = Int4Matrix(packed[..., words], scale[..., groups], (2, 32))
        parts.append(matvec(x[:, 32 * rank : 32 * rank + 32], share.dense(0)))
    assert all_reduce(np.stack(parts)).tolist() == [[352.0, 352.0]]
    wrong = Int4Matrix(packed[..., 4:], scale[..., :1], (2, 32))  # the control
    assert (parts[0] + matvec(x[:, 32:], wrong.dense(0))).tolist() == [[64.0, 64.0]]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_l05_slices_of_the_experts_sum_to_the_whole(ranks, rng):
    given = inputs(dict(T=5, k=2, E=4, H=64, I=256), rng)
    given["x"] = given["x"].astype(F32)
    gate_up, down, inner = given["gate_up"], given["down"], 256 // ranks
    parts = []
    for rank in range(ranks):
        own = np.arange(rank * inner, (rank + 1) * inner)
        both = np.concatenate([own, 256 + own])
        cut = Int4Matrix(gate_up.packed[:, both], gate_up.scale[:, both], (2 * inner, 64))
        words, groups = own[::8] // 8, own[::32] // 32
        rows = Int4Matrix(down.packed[..., words], down.scale[..., groups], (64, inner))
        parts.append(moe_int4(**given | {"gate_up": cut, "down": rows}))
    np.testing.assert_allclose(all_reduce(np.stack(parts)), dense(**given), rtol=1e-5, atol=1e-5)


def test_m07_an_expert_beyond_32_bits(tmp_path, rng):
    """Expert 4681 of [E, 512, 896] words crosses 2^31 elements: a sparse file holds them."""
    packed = np.memmap(tmp_path / "packed", np.int32, "w+", shape=(4682, 512, 896))
    scale = np.memmap(tmp_path / "scale", BF16, "w+", shape=(4682, 512, 224))
    assert packed.size > 2**31
    words = pack_int4(rng.integers(-8, 8, (1, 512, 7168)).astype(np.int8))
    packed[4681], scale[4681] = words[0], 0.5
    expected = 0.5 * unpack_int4(words[0], (512, 7168)).astype(F32)
    assert np.array_equal(Int4Matrix(packed, scale, (512, 7168)).dense(4681), expected)


def test_shapes_and_ids_that_do_not_fit_are_named(rng):
    given = inputs(CASES["one_row"], rng)
    with pytest.raises(ValueError, match="expert 4 of 4"):
        moe_int4(**given | {"experts": np.array([[0, 4]], np.int32)})
    with pytest.raises(ValueError, match=r"picks \(1, 1\), \(1, 2\)"):
        moe_int4(**given | {"experts": given["experts"][:, :1]})
    with pytest.raises(ValueError, match="do not fit rows"):
        moe_int4(**given | {"down": given["gate_up"]})
    with pytest.raises(ValueError, match=r"base \(1, 3\)"):
        moe_int4(**given | {"base": given["x"][:, :3]})
