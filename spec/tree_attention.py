"""Attention of a tree over a paged prefix and its nodes' own paths (absorbed MLA, one key head).

    node i of request r sees positions 0 .. starts[r] + depth(i), one key a position:
        key[p] = pages[page_table[r, p // 64], p % 64]     p <  starts[r]: committed
        key[p] = scratch[r, paths[r, i, p - starts[r]]]    p >= starts[r]: an ancestor, or i itself
    out = softmax(scale * q . key) . key[:latent]          over the positions that the node sees

Keys are taken in chunks of 64 absolute positions, in order, under a running maximum:
    top' = max(top, scores)   decay = exp(top - top')   e = exp(scores - top')
    total = total * decay + sum(e)      acc = acc * decay + round(e) @ values
Splits end at fixed absolute positions (every 512 below 16384, then every 2048); each starts afresh,
and their partials are added in position order with weights exp(top - greatest top). At the end
out = acc / total.

| name       | shape             | dtype, meaning                                      |
|------------|-------------------|-----------------------------------------------------|
| q          | [R, N, h, W]      | bfloat16 or float32; W = latent + rope              |
| pages      | [P, 64, W]        | bfloat16 or float32                                 |
| scratch    | [R, N, W]         | dtype of the pages                                  |
| page_table | [R, M]            | integer; only entries below starts[r] / 64 are read |
| starts     | [R]               | integer: committed positions, 0 allowed             |
| paths      | [R, N, depths]    | int32 nodes from the root to i itself, then -1      |
| sizes      | [R]               | integer: real nodes; rows from there on give zeros  |
| scale      | scalar            | float: factor of the scores (`rope.yarn`)           |
| latent     | scalar            | int: columns of a key that are its value, 1 .. W    |
| out        | [R, N, h, latent] | dtype of q                                          |

A fully committed chunk is shared by all nodes; a later one is gathered along each node's path, with
zeros (score -inf, weight exactly 0) where the node sees nothing. Either way a node and a chunk are
one product of fixed shape: a key gives the same bits from a page as from scratch, and a node's bits
never depend on other nodes.

Rounding: float32 inside; e to the dtype of q before it meets the values; out, once.
Errors: ValueError when shapes do not fit.
Source: absorbed MLA: DeepSeek-V2 (arXiv 2405.04434), section 2.1; the running maximum: online
softmax (arXiv 1805.02867) and FlashAttention (arXiv 2205.14135), section 3.1; attention of a tree:
SpecInfer (arXiv 2305.09781) and DDTree (arXiv 2604.12989); splits at absolute positions are ours.
"""

import numpy as np

from ddtree_numba.spec.numerics import BF16, F32, Cost, widen

TOLERANCE = dict(rtol=2**-6, atol=2e-3)  # another exp, another order, another top to round at

CHUNK = 64  # positions a step, and the positions of a page
NEAR, NEAR_SPLIT, FAR_SPLIT = 16384, 512, 2048  # split length below and from position NEAR
BLOCK = 64  # nodes that go through the chunks together; no result depends on it
LOWEST = F32.type(-3e38)  # a maximum over nothing: finite, so that exp(LOWEST - LOWEST) is no NaN


def tree_attention(
    q: np.ndarray,
    pages: np.ndarray,
    scratch: np.ndarray,
    page_table: np.ndarray,
    starts: np.ndarray,
    paths: np.ndarray,
    sizes: np.ndarray,
    scale: float,
    latent: int,
) -> np.ndarray:
    """Every real node over the positions that it sees."""
    if pages.shape[1:] != (CHUNK, q.shape[-1]) or scratch.shape != (*q.shape[:2], q.shape[-1]):
        raise ValueError(f"pages {pages.shape}, scratch {scratch.shape} do not fit q {q.shape}")
    if paths.shape[:2] != q.shape[:2] or not 0 < latent <= q.shape[-1]:
        raise ValueError(f"paths {paths.shape}, latent {latent} do not fit q {q.shape}")
    out = np.zeros((*q.shape[:-1], latent), q.dtype)
    for r, size in enumerate(sizes):
        prefix = (pages, scratch[r, :size], page_table[r], int(starts[r]))
        for first in range(0, size, BLOCK):
            block = slice(first, min(first + BLOCK, size))
            rows = _attend(q[r, block], *prefix, paths[r, block], scale, latent)
            out[r, block] = rows.astype(q.dtype)
    return out


def _attend(q, pages, scratch, table, start, paths, scale, latent) -> np.ndarray:
    query = widen(q)  # [n, h, W]
    nodes = np.concatenate([widen(scratch), np.zeros((1, q.shape[-1]), F32)])  # row -1: zeros
    ends = start + np.count_nonzero(paths >= 0, axis=1)  # positions that a node sees
    splits: list[RunningSoftmax] = []
    for first in range(0, int(ends.max()), CHUNK):
        if starts_split(first):
            splits.append(RunningSoftmax(query.shape[:2], latent))
        rows = slice(None) if ends.min() > first else np.nonzero(ends > first)[0]
        here = min(max(start - first, 0), CHUNK)  # committed positions of the chunk
        if here == CHUNK:
            keys = widen(pages[table[first // CHUNK]])  # [CHUNK, W]
        else:
            depth = max(first - start, 0)  # of the first position that is not committed
            path = paths[rows, depth : depth + CHUNK - here]
            keys = np.zeros((len(path), CHUNK, q.shape[-1]), F32)
            if here:
                keys[:, :here] = widen(pages[table[first // CHUNK], :here])
            keys[:, here : here + path.shape[1]] = nodes[path]
        scores = np.matmul(query[rows], keys.swapaxes(-1, -2)) * F32.type(scale)
        if here < CHUNK:
            seen = np.arange(first, first + CHUNK) < ends[rows, None]
            scores = np.where(seen[:, None], scores, -np.inf)
        splits[-1].add(rows, scores, keys[..., :latent], q.dtype)
    return merge(splits)


class RunningSoftmax:
    """Softmax-weighted sum of values, for every row and head, chunk after chunk."""

    def __init__(self, rows: tuple[int, ...], width: int):
        self.top = np.full(rows, LOWEST, F32)  # greatest score so far
        self.total = np.zeros(rows, F32)  # sum of exp(score - top)
        self.acc = np.zeros((*rows, width), F32)  # sum of round(exp(score - top)) * value

    def add(self, rows, scores: np.ndarray, values: np.ndarray, dtype: np.dtype) -> None:
        """One chunk: scores [rows, heads, CHUNK]; values broadcast to [rows, CHUNK, width]."""
        top = np.maximum(self.top[rows], scores.max(-1))
        decay = np.exp(self.top[rows] - top)
        weight = np.exp(scores - top[..., None])
        self.total[rows] = self.total[rows] * decay + weight.sum(-1)
        rounded = widen(weight.astype(dtype, copy=False))
        self.acc[rows] = self.acc[rows] * decay[..., None] + np.matmul(rounded, values)
        self.top[rows] = top


def merge(splits: list[RunningSoftmax]) -> np.ndarray:
    """float32: the splits' sums, added in position order."""
    top = np.maximum.reduce([split.top for split in splits])
    acc, total = np.zeros_like(splits[0].acc), np.zeros_like(top)
    for split in splits:
        weight = np.exp(split.top - top)
        acc += split.acc * weight[..., None]
        total += split.total * weight
    return acc / total[..., None]


def starts_split(position: int) -> bool:
    return position % (NEAR_SPLIT if position < NEAR else FAR_SPLIT) == 0


CASES: dict[str, dict] = {
    "root_only": dict(starts=[0], sizes=[1], N=1, h=8, W=80, latent=64),
    "one_row": dict(starts=[500], sizes=[1], N=1, h=8, W=80, latent=64),
    "tiny": dict(starts=[500], sizes=[17], N=17, h=8, W=80, latent=64),
    "one_head": dict(starts=[70], sizes=[9], N=9, h=1, W=80, latent=64),
    "padding": dict(starts=[9, 3, 0, 0], sizes=[8, 3, 1, 0], N=8, h=2, W=24, latent=16),
    "page_edges": dict(
        starts=[0, 1, 63, 64, 65, 127, 128],
        sizes=[17, 2, 1, 17, 1, 2, 17],
        N=17,
        h=2,
        W=24,
        latent=16,
    ),
    "split_edges": dict(starts=[505, 512, 1020], sizes=[17, 17, 17], N=17, h=2, W=24, latent=16),
    "past_64_nodes": dict(starts=[100, 7], sizes=[129, 65], N=129, h=2, W=24, latent=16),
    "chain": dict(starts=[0], sizes=[256], N=256, h=2, W=24, latent=16, chain=True),
    "k26": dict(starts=[8192], sizes=[17], N=17, h=8, W=576, latent=512),
    "k26_long": dict(starts=[131072], sizes=[17], N=17, h=8, W=576, latent=512),
}


def inputs(case: dict, rng: np.random.Generator) -> dict:
    requests, nodes, heads, width = len(case["sizes"]), case["N"], case["h"], case["W"]
    padded = np.arange(nodes) >= np.array(case["sizes"])[:, None]
    q = rng.standard_normal((requests, nodes, heads, width)).astype(BF16)
    scratch = rng.standard_normal((requests, nodes, width)).astype(BF16)
    q[padded], scratch[padded] = np.nan, np.nan
    pages, page_table = random_pages(case["starts"], (width,), rng)
    return dict(
        q=q,
        pages=pages,
        scratch=scratch,
        page_table=page_table,
        starts=np.array(case["starts"], np.int32),
        paths=random_paths(case["sizes"], nodes, rng, case.get("chain", False)),
        sizes=np.array(case["sizes"], np.int32),
        scale=width**-0.5,
        latent=case["latent"],
    )


def random_paths(sizes, width: int, rng: np.random.Generator, chain: bool = False) -> np.ndarray:
    """paths[R, width, depths] of trees whose parents precede their children; padding is -1."""
    trees = []
    for size in sizes:
        nodes: list[list[int]] = []
        for i in range(size):
            parent = i - 1 if chain or rng.random() < 0.4 else int(rng.integers(0, max(i, 1)))
            nodes.append((nodes[parent] if i else []) + [i])
        trees.append(nodes)
    depths = max((len(path) for nodes in trees for path in nodes), default=1)
    paths = np.full((len(sizes), width, depths), -1, np.int32)
    for r, nodes in enumerate(trees):
        for i, path in enumerate(nodes):
            paths[r, i, : len(path)] = path
    return paths


def random_pages(starts, row: tuple[int, ...], rng: np.random.Generator):
    """(pages, page_table): random rows at committed positions of shuffled pages, else NaN."""
    counts = [-(-start // CHUNK) for start in starts]
    pages = np.full((sum(counts) + 2, CHUNK, *row), np.nan, BF16)
    free = iter(rng.permutation(len(pages)))
    table = np.full((len(starts), max(counts) + 1), -1, np.int32)
    for r, start in enumerate(starts):
        for page in range(counts[r]):
            table[r, page] = next(free)
            filled = min(CHUNK, start - page * CHUNK)
            pages[table[r, page], :filled] = rng.standard_normal((filled, *row)).astype(BF16)
    return pages, table


def cost(case: dict) -> Cost:
    """Prefix and own keys once a request; the products of every node with its prefix."""
    heads, width, latent = case["h"], case["W"], case["latent"]
    keys = sum(start + size for start, size in zip(case["starts"], case["sizes"], strict=True))
    pairs = sum(start * size for start, size in zip(case["starts"], case["sizes"], strict=True))
    rows = sum(case["sizes"]) * heads
    moved = 2 * (keys * width + rows * (width + latent))
    return Cost(bytes=moved, flops=2 * pairs * heads * (width + latent))
