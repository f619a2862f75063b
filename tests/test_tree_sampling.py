"""Sampling through a tree: every emitted token has the target's own distribution.

Sampled decoding is `next_token` after each node and then `tree_accept`. The seeds are fixed, so the
numbers are the same in every run.
"""

import numpy as np
import pytest

from ddtree_numba.spec.next_token import SamplingParams, next_token
from ddtree_numba.spec.tree_accept import tree_accept
from ddtree_numba.spec.tree_build import Tree

DRAWS = 100_000
PLAIN = SamplingParams(temperature=1.0)
P = [0.5, 0.3, 0.2]


def log(p):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def draw(row, position, seeds, params):
    """The same row and position for every seed; in parts, which stay in the processor's cache."""
    return np.concatenate(
        [
            next_token(np.tile(row, (len(s), 1)), np.full(len(s), position), s, params)
            for s in np.array_split(seeds, 50)
        ]
    )


class Sampled:
    """A tree of which each node has its own next-token distribution, walked by many seeds."""

    def __init__(self, tokens, parents, distributions, params=PLAIN, draws=DRAWS):
        n = len(tokens)
        self.depths = np.zeros(n, np.int32)
        for i in range(1, n):
            self.depths[i] = self.depths[parents[i]] + 1
        seeds = np.arange(draws, dtype=np.uint64)
        self.targets = np.empty((draws, n), np.int32)
        known: dict = {}  # equal rows at equal positions draw the same: drawn once
        for i, (depth, p) in enumerate(zip(self.depths.tolist(), distributions, strict=True)):
            if (depth, tuple(p)) not in known:
                known[depth, tuple(p)] = draw(log(p), 7 + depth, seeds, params)
            self.targets[:, i] = known[depth, tuple(p)]

        def tiled(x):
            return np.tile(np.array(x, np.int32), (draws, 1))

        sizes = np.full(draws, n, np.int32)
        tree = Tree(tiled(tokens), tiled(parents), tiled(self.depths), tiled(self.depths), sizes)
        self.accepted = tree_accept(tree, self.targets)
        self.tokens = np.array(tokens)

    def emitted(self, index):
        """The token emitted at this place of the round, -1 where the round was shorter."""
        counts, nodes = self.accepted.counts, self.accepted.nodes
        path = self.tokens[nodes[:, min(index + 1, nodes.shape[1] - 1)]]
        end = np.where(counts == index + 1, self.accepted.next_tokens, -1)
        return np.where(counts > index + 1, path, end)


def deviations(tokens, p):
    """Distance of each frequency from p in standard deviations; where p = 0 none may occur."""
    p, n = np.asarray(p, np.float64), len(tokens)
    counts = np.bincount(tokens, minlength=len(p))
    assert n > 0 and len(counts) == len(p) and not counts[p == 0].any()
    return np.abs(counts - n * p)[p > 0] / np.sqrt(n * p * (1 - p))[p > 0]


def assert_distributed(tokens, p, sigmas=3.0):
    assert np.all(deviations(tokens, p) < sigmas), deviations(tokens, p)


def test_s14_siblings_and_the_bonus_after_a_full_path():
    child, other, leaf = [0.1, 0.6, 0.3], [0.7, 0.2, 0.1], [0.25, 0.25, 0.5]
    tokens, parents = [9, 0, 1, 1], [-1, 0, 0, 1]
    run = Sampled(tokens, parents, [P, child, other, leaf])
    first, second, third = (run.emitted(i) for i in range(3))
    assert_distributed(first, P)
    assert_distributed(second[first == 0], child)
    assert_distributed(second[first == 1], other)
    full = (first == 0) & (second == 1)
    assert np.array_equal(full, run.accepted.counts == 3)
    assert_distributed(third[full], leaf)
    # lengths of rounds follow: the root's children hold 0.8 of its mass
    assert abs(np.mean(run.accepted.counts) - (1 + 0.8 + 0.5 * 0.6)) < 0.01


def test_s14_the_classic_mistake_would_be_seen():
    wrong = np.random.default_rng(0).choice(3, DRAWS, p=[0.5, 0.15, 0.35])
    assert np.all(deviations(wrong, P)[1:] > 50)
    residual = np.random.default_rng(0).choice(3, DRAWS, p=[0.51, 0.295, 0.195])
    assert deviations(residual, P).max() > 3


@pytest.mark.parametrize("siblings", [1, 33, 64])
def test_s14_many_siblings(siblings):
    rng = np.random.default_rng(siblings)
    vocabulary = siblings + 9
    p, q = rng.dirichlet(np.full(vocabulary, 2.0)), rng.dirichlet(np.full(vocabulary, 2.0))
    drafted = np.argsort(-p)[:siblings].tolist()
    parents = [-1] + [0] * siblings
    run = Sampled([999, *drafted], parents, [p] + [q] * siblings)
    first, second = run.emitted(0), run.emitted(1)
    hit = np.isin(first, drafted)
    assert np.array_equal(run.accepted.counts, 1 + hit)
    for tokens, expected in ((first, p), (second[hit], q)):
        z = deviations(tokens, expected)
        assert z.max() < 4.5
        assert np.sum(z**2) < vocabulary + 4 * np.sqrt(2 * vocabulary), "chi-squared"


def test_s14_draws_of_neighbouring_positions_are_independent():
    run = Sampled([9, 0, 1, 2], [-1, 0, 0, 0], [P, P, P, P])
    joint = run.emitted(0) * 3 + run.emitted(1)
    assert_distributed(joint, np.outer(P, P).ravel())


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(0.7, 4, 0.9, 0.05)])
def test_s14_a_tree_emits_what_plain_decoding_emits(params):
    """The same seed and positions: not only the distribution, the tokens themselves."""
    rng = np.random.default_rng(1)
    tokens, parents = [9, 0, 1, 1, 2, 0, 3], [-1, 0, 0, 1, 1, 2, 3]
    rows = [rng.dirichlet(np.ones(6)).tolist() for _ in tokens]
    run = Sampled(tokens, parents, rows, params, draws=600)
    emitted = [run.emitted(step) for step in range(4)]
    for seed in range(600):
        node, step = 0, 0
        while node is not None:
            where, key = np.array([7 + step]), np.array([seed], np.uint64)
            token = next_token(log(rows[node])[None], where, key, params)[0]
            assert emitted[step][seed] == token
            children = [i for i in range(7) if parents[i] == node and tokens[i] == token]
            node, step = (children[0] if children else None), step + 1
        assert run.accepted.counts[seed] == step


@pytest.mark.parametrize(
    "filters",
    [dict(min_p=0.2), dict(top_p=0.9), dict(top_k=2), dict(min_p=0.2, top_p=0.9, top_k=2)],
)
@pytest.mark.parametrize("drafted", [[2], [3, 2, 1]])
def test_s18_filters_hold_at_every_node_and_for_the_bonus(filters, drafted):
    p, q = [0.6, 0.3, 0.08, 0.02], [0.02, 0.08, 0.3, 0.6]
    parents = [-1] + [0] * len(drafted)
    params = SamplingParams(temperature=1.0, **filters)
    run = Sampled([9, *drafted], parents, [p] + [q] * len(drafted), params)
    first, second = run.emitted(0), run.emitted(1)
    assert_distributed(first, [2 / 3, 1 / 3, 0, 0])
    hit = np.isin(first, drafted)
    if hit.any():
        assert_distributed(second[hit], [0, 0, 1 / 3, 2 / 3])
    assert hit.any() == (drafted != [2])


def test_temperature_reshapes_the_distribution():
    hot, cold = (SamplingParams(temperature=t) for t in (2.0, 0.5))
    for params in (hot, cold):
        expected = np.power(P, 1 / params.temperature)
        run = Sampled([9, 0], [-1, 0], [P, P], params)
        assert_distributed(run.emitted(0), expected / expected.sum())
