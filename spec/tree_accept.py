"""The path that the target itself would have taken through its tree.

    cur = root; while cur has a child that holds target_tokens[cur]: cur = that child
    next_tokens = target_tokens[cur] at the end

| name          | shape  | dtype, meaning                                                         |
|---------------|--------|------------------------------------------------------------------------|
| tree          | [R, N] | Tree; rows from sizes[r] on are not read                               |
| target_tokens | [R, N] | integer: target's token after each node; -1 (unusable) never matches   |
| nodes         | [R, D] | int32: accepted nodes from the root, then -1; D: the largest depth + 1 |
| counts        | [R]    | int32: how many, the root included (0 for an empty slot)               |
| next_tokens   | [R]    | int32: the target's token after the last of them, the next root        |

Greedy and sampled decoding share this walk, since `next_token` draws each row's token beforehand:
the tree does not depend on the draw, so every emitted token has the target's own distribution
("sample and walk"). Among siblings that hold the same token the lowest index is taken.

Rounding: none; integers.
Errors: ValueError for parents that are no tree and for target_tokens of another shape.
Source: DDTree (arXiv 2604.12989; liranringel/ddtree, `ddtree.py`).
"""

from dataclasses import dataclass

import numpy as np

from ddtree_numba.spec.numerics import Cost
from ddtree_numba.spec.tree_build import Tree, check_tree, random_parents

TOLERANCE = 0


@dataclass(frozen=True)
class Accept:
    """Accepted paths of R requests; see the table above."""

    nodes: np.ndarray
    counts: np.ndarray
    next_tokens: np.ndarray


def tree_accept(tree: Tree, target_tokens: np.ndarray) -> Accept:
    """Walk every request's tree."""
    check_tree(tree.parents, tree.sizes)
    requests, nodes = tree.parents.shape
    if np.shape(target_tokens) != (requests, nodes):
        shape = np.shape(target_tokens)
        raise ValueError(f"target_tokens must be {(requests, nodes)} as the tree, not {shape}")
    real = np.arange(nodes) < tree.sizes[:, None]
    width = int(np.max(tree.depths, where=real, initial=0)) + 1
    result = Accept(
        nodes=np.full((requests, width), -1, np.int32),
        counts=np.zeros(requests, np.int32),
        next_tokens=np.full(requests, -1, np.int32),
    )
    for r, size in enumerate(tree.sizes.tolist()):
        if size:
            parents, tokens = tree.parents[r, :size].tolist(), tree.tokens[r, :size].tolist()
            path, token = _walk(parents, tokens, target_tokens[r, :size].tolist())
            result.nodes[r, : len(path)] = path
            result.counts[r] = len(path)
            result.next_tokens[r] = token
    return result


def _walk(parents: list[int], tokens: list[int], targets: list[int]) -> tuple[list[int], int]:
    """(accepted nodes, next token) of one request."""
    children: dict[tuple[int, int], int] = {}
    for i in range(1, len(parents)):
        children.setdefault((parents[i], tokens[i]), i)  # the lowest index stays
    path = [0]
    while targets[path[-1]] >= 0 and (path[-1], targets[path[-1]]) in children:
        path.append(children[path[-1], targets[path[-1]]])
    return path, targets[path[-1]]


CASES: dict[str, dict] = {
    "root": dict(nodes=1, sizes=[1], tokens=4),
    "chain": dict(nodes=8, sizes=[8], shape="chain", tokens=2),
    "star": dict(nodes=66, sizes=[66], shape="star", tokens=80),
    "duplicate_siblings": dict(nodes=30, sizes=[30, 29], tokens=2),
    "unequal": dict(nodes=66, sizes=[5, 65, 0, 1], tokens=3),
    "unusable_rows": dict(nodes=20, sizes=[20, 20], tokens=2, unusable=0.3),
    "k26": dict(nodes=33, sizes=[33, 33, 33, 33], tokens=4),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Random trees over few tokens, so that walks go deep; padding would match if it were read."""
    tree = random_parents(case, rng)
    parents, sizes = tree["parents"], tree["sizes"]
    depths = np.zeros_like(parents)
    for r, size in enumerate(sizes):
        for i in range(1, size):
            depths[r, i] = depths[r, parents[r, i]] + 1
    tokens = rng.integers(0, case["tokens"], parents.shape, np.int32)
    targets = rng.integers(0, case["tokens"], parents.shape, np.int32)
    targets[rng.random(parents.shape) < case.get("unusable", 0)] = -1
    scores = np.full(parents.shape, np.nan, np.float32)
    return dict(tree=Tree(tokens, parents, depths, scores, sizes), target_tokens=targets)


def cost(case: dict) -> Cost:
    """Tokens, parents and targets read once; paths are at most as long as the tree."""
    return Cost(bytes=len(case["sizes"]) * (12 * case["nodes"] + 12), flops=0)
