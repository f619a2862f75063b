"""Rounding, row-wise products, INT4 golden words, float32 exp and log that kernels repeat."""

import numpy as np
import pytest

from ddtree_numba.spec.numerics import (
    BF16,
    F32,
    Int4Matrix,
    bf16,
    dequantize_int4,
    exp32,
    largest,
    log32,
    mass,
    matvec,
    pack_int4,
    quantize_int4,
    unpack_int4,
    widen,
)

LOW_WORD, HIGH_WORD = 1985229328, -19088744  # [-8 .. -1] and [0 .. 7]


def words(*rows):
    return np.array(rows, np.int32)


def test_bf16_rounds_to_nearest_even():
    half, above = 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20
    assert widen(bf16(np.float32(half))) == 1
    assert widen(bf16(np.float32(above))) == 1 + 2.0**-7
    assert widen(bf16(np.float32(1 + 3 * 2.0**-8))) == 1 + 2.0**-6
    assert bf16(np.zeros(1, F32)).dtype == BF16


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (33, 65), (192, 200)])
def test_matvec_row_does_not_depend_on_its_company(shape, order):
    rng = np.random.default_rng(0)
    weight = np.asarray(rng.standard_normal(shape), F32, order=order)
    x = rng.standard_normal((19, shape[1])).astype(F32)
    together = matvec(x, weight)
    assert np.allclose(together, x.astype(np.float64) @ weight.T.astype(np.float64), atol=1e-4)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 12), slice(18, 19)):
        assert np.array_equal(matvec(x[rows].copy(), weight), together[rows])
    assert np.array_equal(matvec(x[7].copy(), weight), together[7])


def test_l07_golden_words():
    assert unpack_int4(words([LOW_WORD]), (1, 8)).tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]
    assert unpack_int4(words([HIGH_WORD]), (1, 8)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert pack_int4(np.arange(-8, 0, dtype=np.int8)[None]).tolist() == [[LOW_WORD]]
    assert pack_int4(np.arange(0, 8, dtype=np.int8)[None]).tolist() == [[HIGH_WORD]]


def test_l07_filler_nibbles_of_the_last_word_are_cut_off():
    last = words([0x89AB, 0x89AB | 0x7FFF0000, 0x89AB - 2**31])
    for word in last[0]:
        packed = words([LOW_WORD, HIGH_WORD, word])
        values = unpack_int4(packed, (1, 20))
        assert values.shape == (1, 20)
        assert values[0, 16:].tolist() == [0xB - 8, 0xA - 8, 0x9 - 8, 0x8 - 8]
    packed = pack_int4(np.full((2, 20), 7, np.int8))
    assert packed.shape == (2, 3) and np.all(unpack_int4(packed, (2, 20)) == 7)
    assert np.all(packed.view(np.uint32)[:, 2] >> 16 == 0)  # fillers that decode to -8
    matrix = Int4Matrix(packed[None], bf16(np.full((1, 2, 1), 0.5)), (2, 20))
    assert matrix.dense(0).tolist() == [[3.5] * 20] * 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_l07_weight_shape_of_either_width_must_fit_the_words(dtype):
    shape = np.array([2, 20], dtype)
    assert unpack_int4(np.zeros((2, 3), np.int32), shape).shape == (2, 20)
    weight = dequantize_int4(np.zeros((2, 3), np.int32), bf16(np.ones((2, 1))), shape)
    assert weight.shape == (2, 20) and (weight == -8).all()
    with pytest.raises(ValueError, match="weight_shape"):
        unpack_int4(np.zeros((2, 2), np.int32), shape)
    with pytest.raises(ValueError, match="weight_scale"):
        dequantize_int4(np.zeros((2, 3), np.int32), np.ones((2, 2), BF16), shape)
    with pytest.raises(ValueError, match="int32"):
        unpack_int4(np.zeros((2, 3), np.uint32), shape)


def test_dequantize_rounds_the_product_to_bfloat16():
    scale = bf16(np.array([[1.0234375, 3.0]]))
    packed = pack_int4(np.tile(np.arange(-8, 8, dtype=np.int8), 4)[None])
    weight = dequantize_int4(packed, scale, (1, 64))
    assert weight.dtype == BF16
    product = np.float32(7) * widen(scale)[0, 0]  # 7.1640625 needs 10 bits, bfloat16 has 8
    assert widen(weight)[0, 15] != product and widen(weight)[0, 15] == 7.15625
    assert widen(weight)[0, 32:48].tolist() == [3.0 * q for q in range(-8, 8)]


def test_quantize_is_within_half_a_step():
    weight = np.random.default_rng(1).standard_normal((3, 5, 64)).astype(F32)
    values, scale = quantize_int4(weight)
    assert values.min() >= -8 and values.max() <= 7
    restored = widen(dequantize_int4(pack_int4(values), scale, (5, 64)))
    step = np.repeat(widen(scale), 32, axis=-1)
    assert np.all(
        np.abs(restored - weight) <= 0.57 * step
    )  # half a step, and two bfloat16 roundings


def test_int4_matrix_widens_one_expert():
    values, scale = quantize_int4(np.random.default_rng(2).standard_normal((3, 4, 32)))
    matrix = Int4Matrix(pack_int4(values), scale, (4, 32))
    for expert in range(3):
        expected = widen(dequantize_int4(matrix.packed[expert], scale[expert], (4, 32)))
        assert np.array_equal(matrix.dense(expert), expected)
    assert matrix.dense(1) is matrix.dense(1)


def ulps(value, exact):
    return np.max(np.abs(value - exact) / np.spacing(np.abs(exact).astype(F32)))


def test_exp32_is_accurate_and_exact_at_its_ends():
    x = np.linspace(-87, 0, 1_000_001).astype(F32)
    assert ulps(exp32(x), np.exp(x.astype(np.float64))) < 1.5
    ends = np.array([0, -0.0, -np.inf, np.nan, -88, -87.5], F32)
    assert exp32(ends).tolist() == [1, 1, 0, 0, 0, 0]


def test_log32_is_accurate_and_exact_at_one():
    near_one = np.arange(0x3F000000, 0x40000000, 37, dtype=np.uint32).view(F32)
    everywhere = np.exp2(np.linspace(-126, 127, 1_000_001)).astype(F32)
    for x in (near_one, everywhere):
        assert ulps(log32(x), np.log(x.astype(np.float64))) < 2.5
    assert log32(np.ones(1, F32)).tolist() == [0]


def test_exp32_and_log32_bits_are_pinned():
    """Kernels are held to these bits: order and rounding of the operations are the contract."""
    x = np.float32([-0.1, -1.0, -3.7, -50.0])
    assert exp32(x).view(np.uint32).tolist() == [0x3F67A36D, 0x3EBC5AB2, 0x3CCA88FE, 0x1B692BEB]
    assert log32(-x).view(np.uint32).tolist() == [0xC0135D8E, 0, 0x3FA77773, 0x407A5E96]


def test_exp32_and_log32_of_an_element_do_not_depend_on_its_company():
    x = -np.random.default_rng(3).random(1001).astype(F32) * 20
    for function, values in ((exp32, x), (log32, -x)):
        together = function(values)
        for i in (0, 1, 500, 997, 1000):
            assert np.array_equal(function(values[i : i + 1]), together[i : i + 1])


def test_mass_is_the_floor_in_fixed_point():
    x = np.float32([0, -1, -20, -28, -np.inf, np.nan])
    assert mass(x).tolist() == [2**40, *(int(float(e) * 2**40) for e in exp32(x[1:4])), 0, 0]
    assert mass(x).dtype == np.int64


def test_largest_orders_ties_signed_zeros_and_nan():
    x = np.float32([0.0, -0.0, np.nan, 3, -np.inf, 3, np.inf, -2, -1])
    order = [6, 3, 5, 0, 1, 8, 7, 4, 2]
    for k in range(len(x) + 1):
        assert largest(x, k).tolist() == order[:k]
    rows = np.random.default_rng(4).integers(-3, 3, (5, 200)).astype(F32)
    for k in (1, 7, 199, 200):
        expected = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        assert np.array_equal(largest(rows, k), expected)
