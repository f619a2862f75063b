"""Which experts rows ask for: evenly, or with a stated overlap.

Random weights route badly: deep in such a model rows have become alike, and all ask for the same
experts. So the router runs, and its weights count, but experts are drawn, for every layer and row
by itself: the greatest of independent gates, as the router would. Two rows overlap by the share of
a row's experts that the other picks too: k / E where all experts are as likely, 2.1 % of K2.6's.
More overlap comes from experts of unequal popularity: the quantiles of a normal distribution, in
another order each layer, times a factor that gives the overlap, are added to the scores.
"""

from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np

from ddtree_numba.model.config import ModelConfig

ROWS = 1024  # drawn to find the factor


def popularity(experts: int, picks: int, bias: np.ndarray) -> np.ndarray:
    """float64[E]: how often a row whose gates are independent and normal picks each expert."""
    gates = np.random.default_rng(3).standard_normal((ROWS, experts))
    scores = 1 / (1 + np.exp(-gates)) + bias
    picked = np.argpartition(-scores, picks - 1, axis=1)[:, :picks]
    return np.bincount(picked.reshape(-1), minlength=experts) / ROWS


def overlap_of(share: np.ndarray) -> float:
    """Of two rows that pick expert e with probability share[e]; without the bias of a sample."""
    squares = (share**2).sum() - (share * (1 - share)).sum() / (ROWS - 1)
    return squares / share.sum()


def correction(experts: int, picks: int, overlap: float | None) -> tuple[np.ndarray, np.ndarray]:
    """(correction[E], popularity[E]) for an overlap, by bisection; None: all experts alike.

    ValueError if the overlap is below that of equal experts, or 1 and more.
    """
    if overlap is None:
        return np.zeros(experts), np.full(experts, picks / experts)
    if not picks / experts <= overlap < 1:
        raise ValueError(f"overlap must be from {picks / experts:.3f} to below 1, not {overlap}")
    places = (np.arange(experts) + 0.5) / experts
    quantiles = np.array([NormalDist().inv_cdf(place) for place in places])
    low, high = 0.0, 8.0
    for _ in range(20):
        factor = (low + high) / 2
        share = popularity(experts, picks, factor * quantiles)
        low, high = (factor, high) if overlap_of(share) < overlap else (low, factor)
    return factor * quantiles, share


def distinct(share: np.ndarray, rows: int) -> float:
    """Expected number of experts that so many independent rows pick."""
    return float((1 - (1 - share) ** rows).sum())


class Drawn:
    """Stands for a backend's router: gives drawn experts, [rows, k] of each layer in turn."""

    def __init__(self, ops: Any, layers: int, picks: int, bias: np.ndarray) -> None:
        self.ops, self.router = ops, ops.router
        self.layers, self.picks, self.bias = layers, picks, bias
        self.calls: dict[int, int] = {}
        self.placed: dict[tuple[int, int], Any] = {}

    def experts(self, rows: int, layer: int) -> np.ndarray:
        rng = np.random.default_rng((rows, layer))
        gates = rng.standard_normal((rows, len(self.bias)))
        scores = 1 / (1 + np.exp(-gates)) + rng.permutation(self.bias)
        return np.argsort(-scores, axis=1)[:, : self.picks].astype(np.int32)

    def __call__(self, h: Any, *arguments: Any) -> tuple[Any, Any]:
        _, weights = self.router(h, *arguments)
        rows = len(h)
        layer = self.calls.get(rows, 0)
        self.calls[rows] = (layer + 1) % self.layers
        if (rows, layer) not in self.placed:  # not while a graph is captured: calls run once before
            self.placed[rows, layer] = self.ops.array(self.experts(rows, layer))
        return self.placed[rows, layer], weights


def draw(ops: Any, config: ModelConfig, overlap: float | None) -> np.ndarray:
    """Put `Drawn` in the place of a backend's router -> float64[E], how popular each expert is.

    ValueError as of `correction`.
    """
    picks, layers = config.num_experts_per_tok, config.num_hidden_layers
    bias, share = correction(config.n_routed_experts, picks, overlap)
    ops.router = Drawn(ops, layers - config.first_k_dense_replace, picks, bias)
    return share


def statistics(picked: list[np.ndarray]) -> tuple[float, float]:
    """Means over layers: distinct experts, and the overlap of two rows (NaN of a single one)."""
    counts = [len(np.unique(experts)) for experts in picked]
    shares = [
        len(np.intersect1d(experts[i], experts[j])) / experts.shape[1]
        for experts in picked
        for i, j in combinations(range(min(len(experts), 9)), 2)
    ]
    return float(np.mean(counts)), float(np.mean(shares)) if shares else float("nan")
