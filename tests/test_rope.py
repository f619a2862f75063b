"""Rotary positions against complex numbers in float64; YaRN against the published numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.rope import CASES, inputs, rope, yarn, yarn_amplitude, yarn_frequencies
from tests.cases import small

K26 = dict(
    type="yarn",
    factor=64.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=4096,
)


def config(**scaling):
    return SimpleNamespace(
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rope_theta=50000.0,
        rope_scaling={**K26, **scaling},
    )


def dense(x, positions, inv_freq, interleaved, amplitude):
    """Pairs as complex numbers, turned in float64 by the float32 angle."""
    x = x.astype(np.float64)
    half = x.shape[-1] // 2
    pairs = np.arange(2 * half).reshape((half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.T  # [half, 2]
    angle = (positions.astype(F32)[:, None] * inv_freq).astype(np.float64)
    angle = angle.reshape(len(x), *(1,) * (x.ndim - 2), half)
    turned = (x[..., pairs[:, 0]] + 1j * x[..., pairs[:, 1]]) * np.exp(1j * angle) * amplitude
    out = np.empty_like(x)
    out[..., pairs[:, 0]], out[..., pairs[:, 1]] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_complex_rotation(name, rng):
    given = inputs(CASES[name], rng)
    out = rope(**given)
    assert out.dtype == BF16
    np.testing.assert_allclose(out.astype(np.float64), dense(**given), rtol=2**-7, atol=1e-6)


def test_m06_target_turns_neighbours_and_drafter_turns_halves():
    x, inv_freq = np.eye(8, dtype=F32)[:1], np.array([1, 0.1, 0.01, 0.001], F32)
    one = np.array([1])
    assert np.flatnonzero(rope(x, one, inv_freq)).tolist() == [0, 1]
    assert np.flatnonzero(rope(x, one, inv_freq, interleaved=False)).tolist() == [0, 4]
    np.testing.assert_allclose(rope(x, one, inv_freq)[0, :2], [np.cos(1), np.sin(1)], rtol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_m06_scores_depend_on_the_distance_only(interleaved, rng):
    q, k = rng.standard_normal((2, 1, 64))
    inv_freq = yarn_frequencies(64, 50000.0, K26)

    def score(position, distance):
        at = np.array([position]), np.array([position + distance])
        turned = [rope(v, p, inv_freq, interleaved) for v, p in zip((q, k), at, strict=True)]
        return float((turned[0].astype(F32) @ turned[1].T.astype(F32)).item())

    for distance in (0, 1, 7):
        assert score(900, distance) == pytest.approx(score(0, distance), abs=2e-3)
    mixed = float(
        (rope(q, np.array([9]), inv_freq) @ rope(k, np.array([9]), inv_freq, False).T).item()
    )
    assert abs(mixed - score(0, 0)) > 0.1  # the control: layouts mixed up


def test_m06_layouts_agree_after_the_permutation(rng):
    x, inv_freq = rng.standard_normal((5, 64)).astype(F32), yarn_frequencies(64, 50000.0, K26)
    split = [*range(0, 64, 2), *range(1, 64, 2)]
    neighbours = rope(x, np.arange(5), inv_freq)
    halves = rope(x[:, split], np.arange(5), inv_freq, interleaved=False)
    assert np.array_equal(neighbours[:, split], halves)


def test_m04_softmax_scale_has_the_squared_factor():
    assert yarn(config())[1] == pytest.approx(0.14467962580268923, rel=1e-15)
    assert yarn(config(factor=40.0))[1] == pytest.approx(0.135234, abs=5e-7)
    assert yarn(config(factor=32.0))[1] == pytest.approx(0.130861, abs=5e-7)
    assert yarn(config(factor=1.0))[1] == 192**-0.5
    assert yarn(config(mscale_all_dim=0.0))[1] == 192**-0.5
    plain = config()
    for nothing in (None, {}):
        plain.rope_scaling = nothing
        assert yarn(plain)[1] == 192**-0.5


def test_m04_amplitude_is_a_ratio():
    assert yarn_amplitude(K26) == yarn_amplitude(None) == 1.0
    assert yarn_amplitude({**K26, "mscale_all_dim": 0.0}) == pytest.approx(1.4158883083359672)


def test_m04_logits_at_positions_0_1_5(rng):
    """One key hides the scale: the check needs more than one position."""
    width, (inv_freq, scale) = 192, yarn(config())
    positions = np.array([0, 1, 5])
    q, k = rng.standard_normal((2, 3, width))
    q[:, 128:] = rope(q[:, 128:], positions, inv_freq)
    k[:, 128:] = rope(k[:, 128:], positions, inv_freq)

    def probabilities(factor):
        scores = factor * (q[2] @ k.T)
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    magnitude = 0.1 * np.log(64) + 1
    np.testing.assert_allclose(probabilities(scale), probabilities(width**-0.5 * magnitude**2))
    assert np.abs(probabilities(scale) - probabilities(width**-0.5)).max() > 0.01


def test_yarn_frequencies_of_the_published_config():
    """Pairs up to 8 keep their frequency, from 20 on they are 64 times slower, a ramp between."""
    plain = 50000.0 ** (-np.arange(32) / 32)
    ratio = yarn(config())[0] / plain
    np.testing.assert_allclose(ratio[:9], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[20:], 1 / 64, rtol=1e-6)
    np.testing.assert_allclose(ratio[9:20], 1 + np.arange(1, 12) / 12 * (1 / 64 - 1), rtol=1e-6)
    assert yarn(config())[0].dtype == F32


def test_yarn_frequencies_of_other_configs():
    steep = yarn_frequencies(64, 50000.0, {**K26, "beta_fast": 1.0})  # low 19, high 20: a step
    plain = 50000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(steep / plain, np.where(np.arange(32) < 20, 1, 1 / 64), rtol=1e-6)
    drafter = yarn_frequencies(128, 50000.0, {**K26, "type": "deepseek_yarn"})
    ratio = drafter * 50000.0 ** (np.arange(64) / 64)
    np.testing.assert_allclose(ratio[:18], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[39:], 1 / 64, rtol=1e-6)
    assert (np.diff(ratio[17:40]) < 0).all()
    np.testing.assert_allclose(yarn_frequencies(64, 50000.0, None), plain, rtol=1e-6)
    with pytest.raises(ValueError, match="'linear'"):
        yarn_frequencies(64, 50000.0, {"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_row_has_the_same_bits_alone(interleaved, rng):
    x = rng.standard_normal((67, 3, 16)).astype(F32)
    positions = rng.integers(0, 262144, 67)
    inv_freq = yarn_frequencies(16, 50000.0, K26)
    together = rope(x, positions, inv_freq, interleaved)
    for i in range(67):
        alone = rope(x[i : i + 1], positions[i : i + 1], inv_freq, interleaved)
        assert alone.tobytes() == together[i : i + 1].tobytes()
        head = rope(x[i : i + 1, 1], positions[i : i + 1], inv_freq, interleaved)
        assert head.tobytes() == together[i : i + 1, 1].tobytes()


def test_m01_a_nan_row_stays_by_itself(rng):
    given = inputs(CASES["heads"], rng)
    clean = rope(**given)
    given["x"][4] = np.nan
    assert np.array_equal(np.delete(rope(**given), 4, 0), np.delete(clean, 4, 0))


def test_shapes_that_do_not_fit_are_named():
    x, inv_freq = np.zeros((2, 8), F32), np.ones(4, F32)
    for positions, frequencies in ((np.arange(3), inv_freq), (np.arange(2), inv_freq[:3])):
        with pytest.raises(ValueError, match=r"do not fit x \(2, 8\)"):
            rope(x, positions, frequencies)
