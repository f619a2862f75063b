"""How many nodes of a tree to verify: a node is added while it raises the expected tokens a second.

    m[n] = floor(e**scores[n] * 2**40),  t[0] = 2**40,  t[n] = t[n-1] + m[n]
    size = the lowest n from 1 on with t[n] * seconds[n-1] <= t[n-1] * seconds[n], or n = sizes[r]

Nodes come best first, so that n of them are the best tree of n; 2**-40 t[n] tokens are what a round
over the root and n nodes emits in expectation, if the drafter's probabilities hold.

| name     | shape  | dtype, meaning                                                           |
|----------|--------|--------------------------------------------------------------------------|
| scores   | [R, N] | float32, at most 0: log-probability of each node's path; the root's is 0 |
| sizes    | [R]    | integer, 0 .. N: real nodes; nothing is read from there on               |
| seconds  | [N]    | float64, above 0: of a round that verifies the root and n nodes          |
| returned | [R]    | int32: nodes to verify, the root included; 0 where sizes[r] = 0          |

Rounding: e**x as `numerics.exp32`, sums of integers, each product once to float64.
Errors: ValueError for shapes that do not fit, sizes outside 0 .. N, seconds that are not above 0.
Source: the rule of CaDDTree (arXiv 2606.01813), with step times that are measured.
"""

import numpy as np

from ddtree_numba.spec.numerics import F32, MASS_BITS, Cost, mass

TOLERANCE = 0


def tree_size(scores: np.ndarray, sizes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Nodes of each tree that are worth their time."""
    _check(scores, sizes, seconds)
    kept = np.minimum(sizes, 1).astype(np.int32)
    for r, size in enumerate(sizes):
        total = 1 << MASS_BITS
        for n, more in enumerate(mass(scores[r, 1:size]).tolist(), start=1):
            if not float(total + more) * seconds[n - 1] > float(total) * seconds[n]:
                break
            total += more
            kept[r] = n + 1
    return kept


def _check(scores: np.ndarray, sizes: np.ndarray, seconds: np.ndarray) -> None:
    requests, nodes = scores.shape
    if sizes.shape != (requests,):
        raise ValueError(f"sizes must have {requests} entries, not shape {sizes.shape}")
    if np.any((sizes < 0) | (sizes > nodes)):
        raise ValueError(f"sizes must lie between 0 and {nodes}, not {sizes}")
    if seconds.shape != (nodes,):
        raise ValueError(f"seconds must have {nodes} entries, not shape {seconds.shape}")
    if not np.all(seconds > 0):
        raise ValueError(f"seconds must be above 0, not {seconds[~(seconds > 0)][0]}")


CASES: dict[str, dict] = {
    "root": dict(sizes=[1], N=1, slope=0.1),
    "nobody": dict(sizes=[0, 0], N=5, slope=0.1),
    "free_rows": dict(sizes=[33, 32, 7], N=33, slope=0.0),
    "dear_rows": dict(sizes=[9, 1], N=9, slope=1e3),
    "unequal": dict(sizes=[65, 2, 0, 17, 64, 34], N=65, slope=0.02),
    "widest": dict(sizes=[257], N=257, slope=1e-4),
    "k26": dict(sizes=[65], N=65, slope=0.05),
    "k26_batch": dict(sizes=[65] * 64, N=65, slope=0.05),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Scores fall by chance; padding is NaN. A round takes 1 + slope n."""
    requests, nodes = len(case["sizes"]), case["N"]
    steps = rng.exponential(8 / nodes, (requests, nodes))
    steps[:, 0] = 0
    scores = -np.cumsum(steps, axis=1, dtype=F32)
    sizes = np.array(case["sizes"], np.int32)
    scores[np.arange(nodes) >= sizes[:, None]] = np.nan
    return dict(scores=scores, sizes=sizes, seconds=1 + case["slope"] * np.arange(nodes))


def cost(case: dict) -> Cost:
    """Scores and seconds read, a size read and one written."""
    requests = len(case["sizes"])
    return Cost(bytes=requests * (4 * case["N"] + 8) + 8 * case["N"], flops=0)
