"""A round without its two models, in one graph: build, mask and positions, accept, commit.

All 61 layers of K2.6, latent rows of 576; a request keeps up to five rows, across a page's end.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.cache_commit import cache_commit
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.kernels.tree_mask import tree_paths
from ddtree_numba.spec import cache_commit as commit_spec
from ddtree_numba.spec import tree_accept as accept_spec
from ddtree_numba.spec import tree_build as build_spec
from ddtree_numba.spec import tree_mask as mask_spec
from ddtree_numba.spec.numerics import BF16, Cost
from ddtree_numba.spec.tree_links import tree_links

PAGE, START, ACCEPTED = 64, 61, 5
UPDATES = ("tree", "words", "paths", "positions", "accept", "pages")


def spec_round(drafted, target_tokens, tree, words, paths, positions, accept, pages, cache):
    """The specifications one after the other, into the arrays that the kernels fill."""
    built = build_spec.tree_build(**drafted)
    for name, array in vars(built).items():
        getattr(tree, name)[...] = array
    words[...] = mask_spec.tree_mask(built.parents, built.sizes)
    paths[...] = mask_spec.tree_paths(built.parents, built.depths, built.sizes, paths.shape[2])
    positions[...] = cache["starts"][:, None] + built.depths
    walked = accept_spec.tree_accept(built, target_tokens)
    accept.nodes[...] = -1
    accept.nodes[:, : walked.nodes.shape[1]] = walked.nodes
    accept.counts[...], accept.next_tokens[...] = walked.counts, walked.next_tokens
    commit_spec.cache_commit(pages, **cache, nodes=walked.nodes, counts=walked.counts)


def one_round(
    drafted, target_tokens, tree, words, paths, positions, accept, pages, cache, *, stream
):
    tree_build(**drafted, out=tree, stream=stream)
    masks = dict(out=paths, starts=cache["starts"], positions=positions, words=words)
    tree_paths(tree.parents, tree.depths, tree.sizes, **masks, stream=stream)
    tree_accept(tree, target_tokens, out=accept, stream=stream)
    cache_commit(pages, **cache, nodes=accept.nodes, counts=accept.counts, stream=stream)


def inputs(case, rng):
    """The target agrees with the likeliest path for as long as ACCEPTED says."""
    requests, nodes, width = case["requests"], case["budget"] + 1, case["depths"] + 1
    drafted = build_spec.inputs(case, rng)
    tree = build_spec.tree_build(**drafted)
    child, _ = tree_links(tree.parents, tree.sizes)
    agree = (child >= 0) & (tree.depths < ACCEPTED - 1)
    targets = np.where(agree, np.take_along_axis(tree.tokens, np.maximum(child, 0), axis=1), -1)

    def rows(*shape):
        some = rng.standard_normal(1 << 16).astype(BF16)
        return np.resize(some, (case["layers"], *shape, case["width"]))

    return dict(
        drafted=drafted,
        target_tokens=targets.astype(np.int32),
        tree=build_spec.empty_tree(requests, nodes),
        words=np.zeros((requests, nodes, -(-nodes // mask_spec.WORD)), np.uint64),
        paths=np.full((requests, nodes, width), -7, np.int32),
        positions=np.full((requests, nodes), -7, np.int32),
        accept=accept_spec.Accept(
            nodes=np.full((requests, width), -7, np.int32),
            counts=np.zeros(requests, np.int32),
            next_tokens=np.full(requests, -7, np.int32),
        ),
        pages=rows(2 * requests, PAGE),
        cache=dict(
            scratch=rows(requests, nodes),
            page_table=rng.permutation(2 * requests).astype(np.int32).reshape(requests, 2),
            starts=np.full(requests, START, np.int32),
        ),
    )


def cost(case):
    """Of the steps together; the path table and the positions are written once."""
    requests, nodes = case["requests"], case["budget"] + 1
    kept = min(ACCEPTED, case["depths"] + 1)
    tree = dict(nodes=nodes, sizes=[nodes] * requests)
    steps = [
        build_spec.cost(case),
        mask_spec.cost(tree),
        Cost(4 * requests * nodes * (case["depths"] + 2), 0),
        accept_spec.cost(tree),
        commit_spec.cost(case | dict(counts=[kept] * requests)),
    ]
    return Cost(*map(sum, zip(*steps, strict=True)))


def size(requests, budget, depths=7, k=16, layers=61, width=576):
    return dict(requests=requests, budget=budget, depths=depths, k=k, layers=layers, width=width)


SIZES = {f"{r}-requests-budget{b}": size(r, b) for r, b in ((1, 16), (1, 64), (4, 64), (64, 64))}
SPEC = SimpleNamespace(
    __name__="bench.round",
    round=spec_round,
    inputs=inputs,
    cost=cost,
    CASES={"small": size(2, 20, 4, 5, layers=3, width=64)},
    TOLERANCE=0,
)


@pytest.mark.parametrize("case", cases(SPEC, SIZES))
def bench_round(measure, case):
    measure(case, one_round, updates=UPDATES)
