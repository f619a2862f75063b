"""Rotary positions, with the YaRN frequencies and the YaRN softmax scale.

    angle[t, j] = float32(positions[t]) * inv_freq[j]                        float32
    (a, b) -> amplitude * (a cos - b sin, a sin + b cos)                     of pair j
    interleaved: pair j is (x[2j], x[2j+1]), kept in place      (the target)
    half split:  pair j is (x[j], x[j + d/2])                   (the drafter)

YaRN; c(r) is the pair that turns r times over the original length:
    c(r) = d ln(length / (2 pi r)) / (2 ln theta)
    low = max(floor(c(beta_fast)), 0)      high = min(ceil(c(beta_slow)), d - 1)
    ramp_j = clip((j - low) / (high - low), 0, 1)
    inv_freq_j = ramp_j / (factor theta^(2j/d)) + (1 - ramp_j) / theta^(2j/d)
    m(a) = 0.1 a ln(factor) + 1
    amplitude = m(mscale) / m(mscale_all_dim)      softmax scale = d_qk^-0.5 m(mscale_all_dim)^2

| name        | shape       | dtype, meaning                   |
|-------------|-------------|----------------------------------|
| x           | [T, ..., d] | bfloat16 or float32              |
| positions   | [T]         | integer, absolute                |
| inv_freq    | [d/2]       | float32                          |
| interleaved | scalar      | bool: which entries form a pair  |
| amplitude   | scalar      | float: factor of cosine and sine |
| out         | [T, ..., d] | dtype of x                       |

Rounding: cosine and sine of the float32 angle are computed in float64 and rounded to float32: the
correctly rounded values but for a few in 2^29, whichever vector code computes them. Frequencies
likewise. The rotation is float32; out, once.
Errors: ValueError for shapes that do not fit, and for a scaling type other than YaRN.
Source: RoPE: RoFormer (arXiv 2104.09864), section 3; YaRN: arXiv 2309.00071, section 3; mscale keys
and softmax scale: DeepSeek-V3's modelling code (`modeling_deepseek.py`).
"""

import math

import numpy as np

from ddtree_numba.spec.numerics import BF16, F32, Cost, widen

TOLERANCE = dict(rtol=2**-7, atol=2**-8)  # another sine; a difference of two products may cancel


def rope(
    x: np.ndarray,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    interleaved: bool = True,
    amplitude: float = 1.0,
) -> np.ndarray:
    """x, every pair turned by the angle of its position."""
    half = x.shape[-1] // 2
    if inv_freq.shape != (half,) or x.shape[-1] % 2 or positions.shape != x.shape[:1]:
        raise ValueError(
            f"positions {positions.shape}, inv_freq {inv_freq.shape} do not fit x {x.shape}"
        )
    angles = positions.astype(F32)[:, None] * inv_freq.astype(F32)
    angles = angles.reshape(len(x), *(1,) * (x.ndim - 2), half).astype(np.float64)  # [T, 1.., d/2]
    cos = np.cos(angles).astype(F32) * F32.type(amplitude)
    sin = np.sin(angles).astype(F32) * F32.type(amplitude)
    wide = widen(x)
    first = slice(0, None, 2) if interleaved else slice(half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    a, b = wide[..., first], wide[..., second]
    out = np.empty(x.shape, F32)
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out.astype(x.dtype, copy=False)


def yarn(config) -> tuple[np.ndarray, float]:
    """(inv_freq float32[rope / 2], softmax scale) of the target's attention."""
    scaling = config.rope_scaling or {}
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    inv_freq = yarn_frequencies(config.qk_rope_head_dim, config.rope_theta, scaling)
    return inv_freq, width**-0.5 * _scaled(scaling, "mscale_all_dim") ** 2


def yarn_frequencies(dim: int, theta: float, scaling: dict | None) -> np.ndarray:
    """inv_freq float32[dim / 2]; computed in float64, rounded once. No scaling: theta^(-2j/dim)."""
    powers = theta ** (np.arange(0, dim, 2) / dim)
    if not scaling:
        return (1 / powers).astype(F32)
    kind = scaling.get("rope_type", scaling.get("type", "yarn"))
    if kind not in ("yarn", "deepseek_yarn"):
        raise ValueError(f"rope scaling of type {kind!r}; known: yarn, deepseek_yarn")
    length = scaling["original_max_position_embeddings"]

    def turning(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turning(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(turning(scaling.get("beta_slow", 1))), dim - 1)
    width = max(high - low, 0.001)  # equal bounds: a step
    ramp = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return (ramp / (scaling["factor"] * powers) + (1 - ramp) / powers).astype(F32)


def yarn_amplitude(scaling: dict | None) -> float:
    """Factor on cosine and sine; 1 when mscale equals mscale_all_dim, as in K2.6."""
    return _scaled(scaling or {}, "mscale") / _scaled(scaling or {}, "mscale_all_dim")


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(mscale) of the formula above; 1 where nothing is stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaled(scaling: dict, key: str) -> float:
    mscale = scaling.get(key, 1.0 if key == "mscale" else 0.0)
    return yarn_mscale(scaling.get("factor", 1.0), mscale)


# Of the cases, here and where rope is a part: K2.6's.
SCALING = dict(factor=64, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1)
CASES: dict[str, dict] = {
    "one_row": dict(T=1, heads=(), d=16),
    "no_row": dict(T=0, heads=(8,), d=16),
    "heads": dict(T=17, heads=(8,), d=16),
    "half_split": dict(T=17, heads=(8,), d=32, interleaved=False),
    "amplitude": dict(T=3, heads=(2,), d=8, interleaved=False, amplitude=1.4158883083359672),
    "far": dict(T=5, heads=(8,), d=64, first=262139),
    "k26": dict(T=17, heads=(8,), d=64),
    "k26_key": dict(T=17, heads=(), d=64),
    "k26_draft": dict(T=8, heads=(8,), d=128, interleaved=False),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    return dict(
        x=rng.standard_normal((case["T"], *case["heads"], case["d"])).astype(BF16),
        positions=case.get("first", 1000) + np.arange(case["T"]),
        inv_freq=yarn_frequencies(case["d"], 50000.0, SCALING),
        interleaved=case.get("interleaved", True),
        amplitude=case.get("amplitude", 1.0),
    )


def cost(case: dict) -> Cost:
    elements = case["T"] * math.prod(case["heads"]) * case["d"]
    return Cost(bytes=4 * elements + 4 * case["T"] + 2 * case["d"], flops=3 * elements)
