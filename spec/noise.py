"""Counter-based noise: a token's lot depends on (seed, position, token id) and on nothing else.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a 128-bit
counter and a 64-bit key to four 32-bit words. Here key = seed, counter = (token id // 4, 0,
position low, position high), and the token takes word token id % 4. So a draw needs no state, no
order and no company: every rank, every budget and every batch draws the same.
"""

import numpy as np

from ddtree_numba.spec.numerics import F32, LOW, log32

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
WORDS = 4  # words a counter

Words = tuple[np.ndarray, ...]


def halves(x: np.ndarray) -> Words:
    """(low, high) uint32 halves of 64-bit integers."""
    x = np.asarray(x).astype(np.uint64)
    return (x & LOW).astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)


def philox(counter: Words, key: Words) -> Words:
    """Four uint32 words from four counter words and two key words, broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low0, high0 = halves(c0.astype(np.uint64) * MULTIPLIERS[0])
        low1, high1 = halves(c2.astype(np.uint64) * MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + KEY_STEPS[0], k1 + KEY_STEPS[1]
    return c0, c1, c2, c3


def random_words(seeds: np.ndarray, positions: np.ndarray, vocabulary: int) -> np.ndarray:
    """uint32[M, vocabulary]: a word for each row's (seed, position) and each token id."""
    blocks = np.arange(-(-vocabulary // WORDS), dtype=np.uint32)[None, :]
    low, high = (half[:, None] for half in halves(positions))
    key = tuple(half[:, None] for half in halves(seeds))
    words = philox((blocks, np.zeros_like(blocks), low, high), key)
    rows = np.stack(words, axis=-1).reshape(len(seeds), blocks.size * WORDS)
    return rows[:, :vocabulary]


def exponential(words: np.ndarray) -> np.ndarray:
    """float32 draws of the exponential distribution, E = -ln(1 - v), from uniform 32-bit words.

    v = word * 2**-32 + 2**-33 lies in (0, 1) and keeps its relative precision when it is small, as
    it is for the winners of a race among many tokens. So does E: with w = 1 - v rounded,
    -ln(w) * v / (1 - w) repairs what w lost (W. Kahan's log1p). Each operation rounds to float32.
    """
    v = words.astype(F32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    v = np.minimum(v, np.float32(1 - 2.0**-24))
    w = np.float32(1) - v
    lost = w == np.float32(1)  # v below half an ulp of 1: E = v to float32
    kept = np.where(lost, np.float32(1), np.float32(1) - w)
    return np.where(lost, v, -log32(w) * (v / kept))
