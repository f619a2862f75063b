"""Device functions with the bits of `spec/noise.py`: Philox4x32-10 and exponential draws."""

from numba import cuda, float32, uint32, uint64

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.numerics import log32
from ddtree_numba.spec.noise import KEY_STEPS, MULTIPLIERS, ROUNDS
from ddtree_numba.spec.numerics import F32

FIRST_MULTIPLIER, SECOND_MULTIPLIER = map(int, MULTIPLIERS)
FIRST_STEP, SECOND_STEP = map(int, KEY_STEPS)
UNIT, HALF_UNIT = F32.type(2.0**-32), F32.type(2.0**-33)
BELOW_ONE = F32.type(1 - 2.0**-24)


@cuda.jit(device=True, inline="always")
def random_words(seed, position, block, words, k):
    """The words of tokens 4 block .. 4 block + 3 of one row into words[k .. k + 3]."""
    c0, c1 = uint32(block), uint32(0)
    c2, c3 = uint32(position), uint32(position >> 32)
    k0, k1 = uint32(seed), uint32(seed >> uint64(32))
    for _ in range(ROUNDS):
        first = ptx.mul_wide(c0, FIRST_MULTIPLIER)
        second = ptx.mul_wide(c2, SECOND_MULTIPLIER)
        c0 = uint32(uint32(second >> uint64(32)) ^ c1 ^ k0)
        c2 = uint32(uint32(first >> uint64(32)) ^ c3 ^ k1)
        c1, c3 = uint32(second), uint32(first)
        k0, k1 = uint32(k0 + FIRST_STEP), uint32(k1 + SECOND_STEP)
    words[k], words[k + 1], words[k + 2], words[k + 3] = c0, c1, c2, c3


@cuda.jit(device=True, inline="always")
def exponential(word):
    """A draw of the exponential distribution from a uniform word."""
    v = ptx.fmin(float32(word) * UNIT + HALF_UNIT, BELOW_ONE)
    w = float32(1) - v
    draw = v  # below half an ulp of 1
    if w != float32(1):
        draw = -log32(w) * (v / (float32(1) - w))
    return draw
