"""First child and next sibling of every node: the tree as a kernel that walks it wants it.

    first_child[i]  = the lowest j with parents[j] = i
    next_sibling[i] = the lowest j > i with parents[j] = parents[i]

| name         | shape  | dtype, meaning                                     |
|--------------|--------|----------------------------------------------------|
| parents      | [R, N] | integer; parents[:, 0] = -1, parents[i] < i        |
| sizes        | [R]    | integer: real nodes; nothing is read from there on |
| first_child  | [R, N] | int32, -1 for none and in padding                  |
| next_sibling | [R, N] | int32, -1 for none and in padding                  |

Rounding: none; integers.
Errors: ValueError for parents that are no tree.
Source: SGLang (`sgl-kernel/csrc/speculative/eagle_utils.cu`), whose verify kernels take the pair as
`retrive_next_token` and `retrive_next_sibling`.
"""

import numpy as np

from ddtree_numba.spec.numerics import Cost
from ddtree_numba.spec.tree_build import check_tree, random_parents

TOLERANCE = 0


def tree_links(parents: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first_child, next_sibling), siblings in ascending index."""
    check_tree(parents, sizes)
    first_child = np.full(parents.shape, -1, np.int32)
    next_sibling = np.full(parents.shape, -1, np.int32)
    for r, size in enumerate(sizes):
        for i in range(size - 1, 0, -1):  # from the last: each is put before its later siblings
            parent = parents[r, i]
            next_sibling[r, i] = first_child[r, parent]
            first_child[r, parent] = i
    return first_child, next_sibling


CASES: dict[str, dict] = {
    "root": dict(nodes=3, sizes=[1]),
    "chain": dict(nodes=8, sizes=[8], shape="chain"),
    "star": dict(nodes=65, sizes=[65], shape="star"),
    "unequal": dict(nodes=66, sizes=[5, 65, 0]),
    "k26": dict(nodes=33, sizes=[33, 33, 33, 33]),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Random trees, chains or stars; padding is poisoned."""
    return random_parents(case, rng)


def cost(case: dict) -> Cost:
    """Parents read once, two links a node written."""
    return Cost(bytes=len(case["sizes"]) * (12 * case["nodes"] + 4), flops=0)
