"""Which nodes a node may see: itself and its ancestors, as bits and as a list.

    words[r, i]  bit j % 64 of word j // 64 is set  <=>  j is i or an ancestor of i
    paths[r, i]  the same nodes by index, root .. i, then -1           (`tree_paths`)

| name    | shape              | dtype, meaning                                     |
|---------|--------------------|----------------------------------------------------|
| parents | [R, N]             | integer; parents[:, 0] = -1, parents[i] < i        |
| depths  | [R, N]             | integer: edges from the root                       |
| sizes   | [R]                | integer: real nodes; nothing is read from there on |
| width   | scalar             | int: columns of paths; None: the largest depth + 1 |
| words   | [R, N, ceil(N/64)] | uint64; padding rows 0                             |
| paths   | [R, N, width]      | int32; padding rows -1                             |

Rounding: none; integers.
Errors: ValueError for parents that are no tree, for depths that do not follow from them, and for a
width that is too small.
Source: the visibility of DDTree (arXiv 2604.12989; liranringel/ddtree, `ddtree.py`); bits as in
SGLang's `eagle_utils.cu`, whose words end at 32 nodes.
"""

import numpy as np

from ddtree_numba.spec.numerics import Cost
from ddtree_numba.spec.tree_build import check_tree, random_parents

TOLERANCE = 0
WORD = 64


def tree_mask(parents: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Ancestor bits, uint64[R, N, ceil(N/64)]."""
    check_tree(parents, sizes)
    requests, nodes = parents.shape
    words = np.zeros((requests, nodes, -(-nodes // WORD)), np.uint64)
    for r, size in enumerate(sizes):
        for i in range(size):
            if i:
                words[r, i] = words[r, parents[r, i]]
            words[r, i, i // WORD] |= np.uint64(1) << np.uint64(i % WORD)
    return words


def tree_paths(
    parents: np.ndarray, depths: np.ndarray, sizes: np.ndarray, width: int | None = None
) -> np.ndarray:
    """Nodes from the root down to each node, int32[R, N, width]."""
    check_tree(parents, sizes)
    requests, nodes = parents.shape
    real = np.arange(nodes) < np.asarray(sizes)[:, None]
    deepest = int(np.max(depths, where=real, initial=0))
    width = deepest + 1 if width is None else width
    if width <= deepest:
        raise ValueError(f"width {width} is too small for a node of depth {deepest}")
    paths = np.full((requests, nodes, width), -1, np.int32)
    for r, size in enumerate(sizes):
        for i in range(size):
            depth, parent = depths[r, i], parents[r, i]
            if depth != (depths[r, parent] + 1 if i else 0):
                raise ValueError(f"depths[{r}, {i}] = {depth} does not follow from the parents")
            if i:
                paths[r, i] = paths[r, parent]
            paths[r, i, depth] = i
    return paths


CASES: dict[str, dict] = {
    "root": dict(nodes=1, sizes=[1]),
    **{
        f"{shape}_of_{n}": dict(nodes=n, sizes=[n], shape=shape)
        for shape in ("chain", "star", "random")
        for n in (31, 32, 33, 63, 64, 65, 129, 257)
    },
    "unequal": dict(nodes=66, sizes=[5, 65, 0]),
    "k26": dict(nodes=33, sizes=[33, 33, 33, 33]),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Random trees, chains or stars; padding is poisoned."""
    return random_parents(case, rng)


def cost(case: dict) -> Cost:
    """Parents read once, words written once."""
    row = 4 + 8 * -(-case["nodes"] // WORD)
    return Cost(bytes=len(case["sizes"]) * (case["nodes"] * row + 4), flops=0)
