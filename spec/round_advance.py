"""The end of a round: what it emits, and where each request stands for the next one.

    c = counts[r]; a request of c = 0 takes no part: it emits nothing and nothing of it changes
    tokens[r] = tree_tokens[r, nodes[r, 1 .. c-1]], next_tokens[r], then -1        c tokens in all
    roots[r]  = next_tokens[r], unless that is -1: the root stays
    starts[r] += c,  room[r] -= c

| name        | shape  | dtype, meaning                                                          |
|-------------|--------|-------------------------------------------------------------------------|
| roots       | [R]    | integer: last token of each request, known but not committed; in place  |
| starts      | [R]    | integer: committed positions; in place                                  |
| room        | [R]    | integer: greatest depth of the next tree; below 0: ended; in place      |
| tree_tokens | [R, N] | integer: tokens of the round's trees                                    |
| nodes       | [R, D] | integer: accepted nodes from the root; not read from counts[r] on       |
| counts      | [R]    | integer: accepted nodes, 0 .. D, the root included                      |
| next_tokens | [R]    | integer: the target's token after the last of them; -1: there was none  |
| tokens      | [R, D] | int32, returned: the emitted tokens in order, then -1                   |

A next token of -1 stands in the report where the token would: the host sees it and ends the
request, whose root must stay a token until then.

Rounding: none; integers.
Errors: ValueError, before anything is written, for shapes that do not fit, counts outside 0 .. D
and nodes outside the tree.
Source: DDTree (arXiv 2604.12989; liranringel/ddtree, `ddtree.py`): the next token is the new root.
"""

import numpy as np

from ddtree_numba.spec.numerics import Cost

TOLERANCE = 0


def round_advance(
    roots: np.ndarray,
    starts: np.ndarray,
    room: np.ndarray,
    tree_tokens: np.ndarray,
    nodes: np.ndarray,
    counts: np.ndarray,
    next_tokens: np.ndarray,
) -> np.ndarray:
    """Report a round, and move roots, starts and room on."""
    _check(roots, starts, room, tree_tokens, nodes, counts, next_tokens)
    tokens = np.full(nodes.shape, -1, np.int32)
    for r, count in enumerate(counts.tolist()):
        if count:
            tokens[r, : count - 1] = tree_tokens[r, nodes[r, 1:count]]
            tokens[r, count - 1] = next_tokens[r]
            if next_tokens[r] != -1:
                roots[r] = next_tokens[r]
            starts[r] += count
            room[r] -= count
    return tokens


def _check(roots, starts, room, tree_tokens, nodes, counts, next_tokens) -> None:
    requests, depths = nodes.shape
    given = dict(roots=roots, starts=starts, room=room, counts=counts, next_tokens=next_tokens)
    for name, value in given.items():
        if value.shape != (requests,):
            raise ValueError(f"{name} must have {requests} entries, not shape {value.shape}")
    if tree_tokens.ndim != 2 or len(tree_tokens) != requests:
        raise ValueError(f"tree_tokens must have {requests} rows, not shape {tree_tokens.shape}")
    if np.any((counts < 0) | (counts > depths)):
        raise ValueError(f"counts must lie between 0 and {depths}, not {counts}")
    real = np.arange(depths) < counts[:, None]
    if np.any(real & ((nodes < 0) | (nodes >= tree_tokens.shape[1]))):
        raise ValueError(f"nodes must lie below {tree_tokens.shape[1]}, not {nodes[real]}")


CASES: dict[str, dict] = {
    "root_only": dict(counts=[1], N=1, D=1),
    "nobody": dict(counts=[0, 0], N=5, D=3),
    "unequal": dict(counts=[3, 0, 8, 1], N=17, D=8),
    "no_distribution": dict(counts=[1, 4, 0, 2], N=9, D=4, unusable=[0, 1, 2]),
    "full_path": dict(counts=[5, 5], N=5, D=5),
    "many": dict(counts=[1 + r % 8 for r in range(40)], N=33, D=8),
    "k26": dict(counts=[5], N=17, D=8),
    "k26_batch": dict(counts=[1 + r % 8 for r in range(64)], N=65, D=8),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Nodes that are not read, and those of requests that take no part, lie outside the tree."""
    counts = np.array(case["counts"], np.int32)
    requests, width = len(counts), case["N"]
    nodes = np.full((requests, case["D"]), 1 << 20, np.int32)
    for r in np.flatnonzero(counts):
        path = 1 + rng.permutation(width - 1)[: counts[r] - 1]
        nodes[r, : counts[r]] = np.append(0, np.sort(path))
    next_tokens = rng.integers(0, 1000, requests, np.int32)
    next_tokens[case.get("unusable", [])] = -1
    return dict(
        roots=rng.integers(0, 1000, requests, np.int32),
        starts=rng.integers(0, 5000, requests, np.int32),
        room=rng.integers(8, 100, requests, np.int32),
        tree_tokens=rng.integers(0, 1000, (requests, width), np.int32),
        nodes=nodes,
        counts=counts,
        next_tokens=next_tokens,
    )


def cost(case: dict) -> Cost:
    """Nodes and their tokens read, the report written; five words a request read, three written."""
    requests = len(case["counts"])
    return Cost(bytes=4 * (3 * requests * case["D"] + 8 * requests), flops=0)
