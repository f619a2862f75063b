"""The budget most probable continuations of each request, as a tree (DDTree's best-first search).

    node:   a path of ranks (r1 .. rd), d <= L; the root is the empty path
    score:  (log_probs[0][r1] + log_probs[1][r2]) + .. + log_probs[d-1][rd]
    nodes are numbered by ascending (-score, path); the root is 0

Depth d offers k ranked candidates, the same ones below every parent. As log-probabilities are not
positive and descend with the rank, a parent precedes its children, a likelier sibling the less
likely, and the tree of a smaller budget is a prefix of the larger one.

| name        | shape     | dtype, meaning                                                |
|-------------|-----------|---------------------------------------------------------------|
| root_tokens | [R]       | integer: last committed token                                 |
| token_ids   | [R, L, k] | integer: candidates of each depth; L = 0 or k = 0: root alone |
| log_probs   | [R, L, k] | float32, descending, <= 0; see below for -inf and NaN         |
| budget      | scalar    | int >= 0: nodes besides the root, at most                     |
| max_depths  | [R]       | integer: no node of request r is deeper; None: L              |
| tokens      | [R, N]    | int32; N = budget + 1, real rows first; padding -1            |
| parents     | [R, N]    | int32; -1 for the root and padding                            |
| depths      | [R, N]    | int32; 0 for the root and padding                             |
| scores      | [R, N]    | float32; root 0, padding -inf                                 |
| sizes       | [R]       | int32: 1 + min(budget, number of possible nodes)              |

A log-probability of -inf makes a node like any other, after all finite ones. A list of candidates
ends at its first NaN, and the depths end with an empty list: an unusable draft gives the root
alone.

Rounding: a score is a float32 sum from left to right, each step rounded.
Errors: ValueError naming the argument.
Source: DDTree (arXiv 2604.12989; liranringel/ddtree, `ddtree.py`, `build_ddtree_tree`); the total
order and the float32 sum are ours.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ddtree_numba.spec.numerics import F32, Cost

TOLERANCE = 0

Path = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """Drafted continuations of R requests; see the table above."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray
    sizes: np.ndarray

    def prefix(self, sizes: np.ndarray) -> "Tree":
        """The first sizes[r] nodes of each request: the tree of a smaller budget."""
        width = int(sizes.max(initial=0))
        return Tree(
            tokens=self.tokens[:, :width],
            parents=self.parents[:, :width],
            depths=self.depths[:, :width],
            scores=self.scores[:, :width],
            sizes=sizes,
        )


def tree_build(
    root_tokens: np.ndarray,
    token_ids: np.ndarray,
    log_probs: np.ndarray,
    budget: int,
    max_depths: np.ndarray | None = None,
) -> Tree:
    """The tree of each request."""
    _check(root_tokens, token_ids, log_probs, budget, max_depths)
    requests, depth, _ = log_probs.shape
    tree = empty_tree(requests, budget + 1)
    limits = [depth] * requests if max_depths is None else np.minimum(max_depths, depth).tolist()
    candidates = (~np.isnan(log_probs)).sum(axis=2)
    for r in range(requests):
        lists = [log_probs[r, d, : candidates[r, d]].tolist() for d in range(limits[r])]
        scores, paths, parents = _best_first(lists, budget)
        size = len(scores)
        tree.sizes[r] = size
        tree.scores[r, :size] = scores
        tree.parents[r, :size] = parents
        tree.depths[r, :size] = [len(path) for path in paths]
        tree.tokens[r, 0] = root_tokens[r]
        ranks = np.array([path[-1] for path in paths[1:]], np.int64)
        tree.tokens[r, 1:size] = token_ids[r, tree.depths[r, 1:size] - 1, ranks]
    return tree


def empty_tree(requests: int, nodes: int) -> Tree:
    """A tree of padding alone."""
    shape = (requests, nodes)
    return Tree(
        tokens=np.full(shape, -1, np.int32),
        parents=np.full(shape, -1, np.int32),
        depths=np.zeros(shape, np.int32),
        scores=np.full(shape, -np.inf, F32),
        sizes=np.zeros(requests, np.int32),
    )


def _best_first(
    log_probs: list[list[float]], budget: int
) -> tuple[list[float], list[Path], list[int]]:
    """(scores, rank paths, parents) of the root and up to `budget` nodes.

    Every chosen node brings its next sibling and its first child into the heap. Both sort after it,
    and every other node has one that brings it, so the heap's first is always the next in the
    order.
    """
    scores: list[float] = [0.0]
    paths: list[Path] = [()]
    parents = [-1]
    heap: list[tuple[float, Path, int]] = []

    def offer(parent: int, rank: int) -> None:
        depth = len(paths[parent])
        if depth < len(log_probs) and rank < len(log_probs[depth]):
            # the float32 sum: rounding a float64 sum of two float32 again changes nothing
            score = float(np.float32(scores[parent] + log_probs[depth][rank]))
            heappush(heap, (-score, (*paths[parent], rank), parent))

    offer(0, 0)
    while heap and len(scores) <= budget:
        negative, path, parent = heappop(heap)
        scores.append(-negative)
        paths.append(path)
        parents.append(parent)
        offer(parent, path[-1] + 1)
        offer(len(scores) - 1, 0)
    return scores, paths, parents


def _check(root_tokens, token_ids, log_probs, budget, max_depths) -> None:
    if budget != int(budget) or budget < 0:
        raise ValueError(f"budget must be an integer >= 0, not {budget}")
    shape, dtype = np.shape(log_probs), np.asarray(log_probs).dtype
    if len(shape) != 3 or dtype != F32:
        raise ValueError(f"log_probs must be float32 [requests, depths, k], not {dtype} {shape}")
    if np.shape(token_ids) != log_probs.shape:
        raise ValueError(f"token_ids {np.shape(token_ids)} must match log_probs {log_probs.shape}")
    for name, value in (("root_tokens", root_tokens), ("max_depths", max_depths)):
        if value is not None and np.shape(value) != log_probs.shape[:1]:
            raise ValueError(f"{name} must have one entry a request, not {np.shape(value)}")
    if max_depths is not None and np.any(np.asarray(max_depths) < 0):
        raise ValueError("max_depths must not be negative")
    if np.any(log_probs > 0):
        raise ValueError("log_probs must not be positive")
    former, later = log_probs[:, :, :-1], log_probs[:, :, 1:]
    if np.any((later > former) | (np.isnan(former) & ~np.isnan(later))):
        raise ValueError("log_probs must descend along the last axis, NaN last")


def check_tree(parents: np.ndarray, sizes: np.ndarray) -> None:
    """ValueError unless all real nodes form trees: parents[0] = -1 and 0 <= parents[i] < i.

    That order excludes cycles, second roots and ancestors outside the request. Size 0: empty slot.
    """
    if np.ndim(parents) != 2:
        raise ValueError(f"parents must be [requests, nodes], not {np.shape(parents)}")
    requests, nodes = parents.shape
    if np.shape(sizes) != (requests,) or np.any((sizes < 0) | (sizes > nodes)):
        raise ValueError(f"sizes must be {requests} numbers from 0 to {nodes}, not {sizes}")
    index = np.arange(nodes)
    legal = np.where(index == 0, parents == -1, (parents >= 0) & (parents < index))
    wrong = np.argwhere(~legal & (index < np.asarray(sizes)[:, None]))
    if len(wrong):
        r, i = wrong[0]
        allowed = f"an index from 0 to {i - 1}" if i else "-1, for the root"
        raise ValueError(f"parents[{r}, {i}] must be {allowed}, not {parents[r, i]}")


CASES: dict[str, dict] = {
    "no_budget": dict(requests=2, depths=3, k=4, budget=0),
    "no_depth": dict(requests=2, depths=0, k=4, budget=5),
    "no_candidates": dict(requests=1, depths=3, k=0, budget=5),
    "one_depth": dict(requests=1, depths=1, k=6, budget=4),
    "chain": dict(requests=1, depths=7, k=1, budget=7),
    "more_budget_than_nodes": dict(requests=2, depths=2, k=3, budget=20),
    "all_equal": dict(requests=2, depths=4, k=3, budget=30, values=1),
    "ties": dict(requests=3, depths=7, k=8, budget=63, values=3),
    "minus_infinity": dict(requests=2, depths=3, k=5, budget=64, excluded=2),
    "two_words": dict(requests=1, depths=7, k=16, budget=65),
    "largest": dict(requests=1, depths=15, k=64, budget=256),
    "k26": dict(requests=4, depths=7, k=32, budget=32),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """`values`: so many distinct log-probabilities; `excluded`: so many last ranks are -inf."""
    requests, depths, k = case["requests"], case["depths"], case["k"]
    shape = (requests, depths, k)
    draws = rng.exponential(2.0, shape).astype(F32)
    if "values" in case:
        draws = rng.integers(1, case["values"] + 1, shape).astype(F32)
    log_probs = -np.sort(draws, axis=2)
    log_probs[:, :, k - case.get("excluded", 0) :] = -np.inf
    vocabulary = np.broadcast_to(np.arange(1000, dtype=np.int32), (requests, depths, 1000))
    return dict(
        root_tokens=rng.integers(0, 1000, requests, np.int32),
        token_ids=rng.permuted(vocabulary, axis=2)[:, :, :k],
        log_probs=log_probs,
        budget=case["budget"],
    )


def random_parents(case: dict, rng: np.random.Generator) -> dict:
    """parents and sizes of chains, stars or random trees, as `shape` says; padding is poisoned."""
    sizes, nodes = np.array(case["sizes"], np.int32), case["nodes"]
    index = np.arange(nodes, dtype=np.int32)
    parents = {
        "chain": lambda: np.tile(index - 1, (len(sizes), 1)),
        "star": lambda: np.tile(np.minimum(index - 1, 0), (len(sizes), 1)),
        "random": lambda: rng.integers(0, np.maximum(index, 1), (len(sizes), nodes), np.int32),
    }[case.get("shape", "random")]()
    parents[:, 0] = -1
    parents[index >= sizes[:, None]] = nodes + 999
    return dict(parents=parents, sizes=sizes)


def cost(case: dict) -> Cost:
    """Candidates read once, the tree written once; two sums a node."""
    requests, nodes = case["requests"], case["budget"] + 1
    candidates = requests * case["depths"] * case["k"]
    moved = 8 * candidates + requests * (16 * nodes + 8)
    return Cost(bytes=moved, flops=2 * requests * nodes)
