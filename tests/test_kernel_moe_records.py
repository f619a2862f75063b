"""Experts packed in fragment order: every weight, scales at their ends, what is refused."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import moe_sliced
from ddtree_numba.spec import moe_int4 as spec
from ddtree_numba.spec.numerics import F32, Int4Matrix, bf16, dequantize_int4, pack_int4
from tests.expert_records import packed, sums


def unpacked(records) -> np.ndarray:
    """Raw nibbles times multipliers, summed up as the fma does, float64[E, rows, columns]."""
    words = records.words
    total, tiles, depth, _ = words.shape
    bits = words[..., 128:].copy().view(np.uint16).reshape(total, tiles, depth, 8, 2, 2)
    values = np.zeros((total, tiles, 2, 8, depth, 2, 4, 2, 2, 2))  # e tile half g step h t j p i
    nibbles = words[..., :128].reshape(total, tiles, depth, 8, 4, 2, 2)  # e tile step g t h j
    for half in range(2):
        factor = (bits[..., half].astype(np.uint32) << 16).view(F32).astype(float)
        for p in range(2):
            for i in range(2):
                raw = nibbles >> (4 * (half + 2 * p) + 16 * i) & 15
                scale = factor * 2.0 ** (-125 if half == 0 else -121)  # e tile step g h
                value = (raw.astype(float) - 8) * scale[:, :, :, :, None, :, None]
                values[:, :, half, :, :, :, :, :, p, i] = value.transpose(0, 1, 3, 2, 5, 4, 6)
    return values.reshape(total, tiles * 16, depth * 64)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("inner", [32, 64])
def test_records_hold_the_published_weights(gated, inner, rng):
    """Nibble by nibble; gate and up rows are interleaved by eight, what is filled up is 0."""
    shape = (2 * inner, 128) if gated else (64, inner)
    matrix = spec.random_int4(2, *shape, rng)
    matrix.scale[0, 3], matrix.scale[1, 0, 0] = 0, -0.25
    found = bf16(unpacked(packed(matrix, gated)))
    expected = dequantize_int4(matrix.packed, matrix.scale, matrix.shape)
    if gated:
        tiles = found.reshape(2, 8, 2, 8, 128)
        found = tiles.swapaxes(1, 2).reshape(2, 2, 64, 128)
        assert not found[:, :, inner:].astype(F32).any()
        found = found[:, :, :inner].reshape(2, 2 * inner, 128)
    assert not found[..., expected.shape[-1] :].astype(F32).any()
    found = found[..., : expected.shape[-1]].astype(F32)
    assert np.array_equal(found, expected.astype(F32))


def test_extreme_scales_are_exact(rng):
    """Every nibble with scales from 2**-110 to below 8, through one token that picks a column."""
    exact = [2.0**-110, 1.9921875 * 2.0**-110, 2.0**-20 * 1.2890625, -0.7734375, 7.96875, 0.0]
    values = np.tile(np.arange(-8, 8, dtype=np.int8), (1, 64, 4))  # [1, 64, 64]
    scale = np.resize(np.array(exact), (1, 64, 2))
    matrix = Int4Matrix(pack_int4(values), bf16(scale), (64, 64))
    records = packed(matrix, True)
    x = bf16(np.eye(64)[:16])
    found = sums(
        moe_sliced.make(1, True, direct=True, raw=True), 0, x, np.zeros((16, 1), np.int32), records
    )
    expected = dequantize_int4(matrix.packed, matrix.scale, (64, 64))[0].astype(F32)[:, :16].T
    rows = np.arange(32).reshape(4, 8)
    order = np.stack([rows, rows + 32], 1).reshape(-1)  # gate and up, interleaved
    assert np.array_equal(found[:, :64], expected[:, order])


@pytest.mark.parametrize("scale", [8.0, 2.0**-111, np.inf, np.nan, 1e-40])
def test_scales_out_of_range_are_refused_by_name(scale, rng):
    matrix = spec.random_int4(3, 64, 64, rng)
    matrix.scale[1, 5, 1] = scale
    with pytest.raises(ValueError, match=r"weights: expert 1 has a scale that is neither 0 nor"):
        packed(matrix, True)
