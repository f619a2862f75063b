"""Keep the cache rows of the accepted path: scratch -> pages, all layers at once, in place.

    row j of request r, j < counts[r]:  p = starts[r] + j
    pages[:, page_table[r, p // S], p % S] = scratch[:, r, nodes[r, j]]

| name       | shape          | dtype, meaning                                                 |
|------------|----------------|----------------------------------------------------------------|
| pages      | [Y, P, S, ...] | committed rows of Y layers, P pages of S positions (64 in use) |
| scratch    | [Y, R, N, ...] | dtype of the pages: the tree's own rows; may view the pages    |
| page_table | [R, M]         | integer: page of positions mS .. mS + S-1; -1: none is owned   |
| starts     | [R]            | integer: committed positions before this call                  |
| nodes      | [R, D]         | integer: accepted nodes; nothing is read from counts[r] on     |
| counts     | [R]            | integer: rows to keep, 0 .. D                                  |

All rows are read before any is written; nothing but the named rows is touched.

Rounding: none.
Errors: ValueError, before anything is written, for shapes and dtypes that do not fit, a position
without a page of its own, a node outside the scratch, and counts outside 0 .. D.
Source: DDTree (arXiv 2604.12989; liranringel/ddtree, `ddtree.py`) moves accepted rows to the front
of their window; pages as in PagedAttention (arXiv 2309.06180), section 4.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, F32, Cost

TOLERANCE = 0


def cache_commit(
    pages: np.ndarray,
    scratch: np.ndarray,
    page_table: np.ndarray,
    starts: np.ndarray,
    nodes: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Copy the accepted rows into their pages."""
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    _check(pages, scratch, page_table, starts, nodes, counts)
    page_size = pages.shape[2]
    request, j = np.nonzero(np.arange(nodes.shape[1]) < counts[:, None])
    position = starts[request] + j
    index = position // page_size
    if np.any(index >= page_table.shape[1]):
        r = request[index >= page_table.shape[1]][0]
        held = page_table.shape[1] * page_size
        raise ValueError(f"page_table holds {held} positions; request {r} needs more")
    page, node = page_table[request, index], nodes[request, j]
    if np.any((page < 0) | (page >= pages.shape[1])):
        at = np.flatnonzero((page < 0) | (page >= pages.shape[1]))[0]
        where = f"page_table[{request[at]}, {index[at]}]"
        raise ValueError(f"{where} must be a page below {pages.shape[1]}, not {page[at]}")
    if np.any((node < 0) | (node >= scratch.shape[2])):
        at = np.flatnonzero((node < 0) | (node >= scratch.shape[2]))[0]
        where = f"nodes[{request[at]}, {j[at]}]"
        raise ValueError(f"{where} must be a node below {scratch.shape[2]}, not {node[at]}")
    rows = scratch[:, request, node]  # a copy: all is read before any write
    pages[:, page, position % page_size] = rows


def _check(pages, scratch, page_table, starts, nodes, counts) -> None:
    requests = scratch.shape[1]
    if pages.shape[0] != scratch.shape[0] or pages.shape[3:] != scratch.shape[3:]:
        raise ValueError(
            f"scratch {scratch.shape} and pages {pages.shape} differ in layers or width"
        )
    if pages.dtype != scratch.dtype:
        raise ValueError(f"scratch is {scratch.dtype}, pages are {pages.dtype}")
    for name, value, axes in (("page_table", page_table, 2), ("nodes", nodes, 2)):
        if np.ndim(value) != axes or len(value) != requests:
            raise ValueError(f"{name} must have {requests} rows, not shape {np.shape(value)}")
    for name, value in (("starts", starts), ("counts", counts)):
        if value.shape != (requests,):
            raise ValueError(f"{name} must have {requests} entries, not shape {value.shape}")
    if np.any(starts < 0):
        raise ValueError(f"starts must not be negative: {starts}")
    if np.any((counts < 0) | (counts > nodes.shape[1])):
        raise ValueError(f"counts must lie between 0 and {nodes.shape[1]}, not {counts}")


CASES: dict[str, dict] = {
    "root_only": dict(layers=1, page=16, starts=[0], counts=[1], nodes=1, width=8),
    "nothing": dict(layers=2, page=16, starts=[3, 16], counts=[0, 0], nodes=4, width=8),
    "page_boundary": dict(
        layers=3, page=16, starts=[15, 16, 31], counts=[2, 3, 4], nodes=9, width=8
    ),
    "two_boundaries": dict(layers=2, page=4, starts=[3, 1], counts=[8, 7], nodes=33, width=8),
    "unequal": dict(layers=6, page=64, starts=[63, 200, 5], counts=[8, 1, 4], nodes=65, width=80),
    "k26": dict(layers=61, page=64, starts=[4093] * 4, counts=[5] * 4, nodes=33, width=576),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    """Shuffled pages; rows that are not committed and nodes that are not read are poisoned."""
    requests, page = len(case["starts"]), case["page"]
    starts, counts = np.array(case["starts"]), np.array(case["counts"], np.int32)
    owned = int(-(-(starts + counts).max() // page)) + 1
    shape = (case["layers"], requests * owned + 1, page, case["width"])
    nodes = np.full((requests, int(counts.max()) + 1), case["nodes"] + 999, np.int32)
    for r, count in enumerate(counts):
        path = 1 + rng.permutation(case["nodes"] - 1)[: max(count - 1, 0)]
        nodes[r, :count] = np.sort(np.append(path, 0))[:count]
    scratch = rng.standard_normal((case["layers"], requests, case["nodes"], case["width"]))
    return dict(
        pages=np.full(shape, np.nan, F32).astype(BF16),
        scratch=scratch.astype(F32).astype(BF16),
        page_table=1 + rng.permutation(requests * owned).astype(np.int32).reshape(requests, owned),
        starts=starts,
        nodes=nodes,
        counts=counts,
    )


def cost(case: dict) -> Cost:
    """Each kept row read once and written once, in bfloat16."""
    moved = 2 * 2 * case["layers"] * sum(case["counts"]) * case["width"]
    return Cost(bytes=moved, flops=0)
