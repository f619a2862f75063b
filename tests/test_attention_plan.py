"""The plan of tree attention: every key once, shared out evenly."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.attention_plan import PIECE
from ddtree_numba.kernels.attention_splits import CHUNK, EDGES, split_of, split_start
from ddtree_numba.kernels.tree_attention import Workspace, plan_attention, workspace


def planned(starts, sizes, nodes, depths, heads=8, blocks=5, rng=None):
    """Items by block, of random trees."""
    paths = np.full((len(starts), nodes, depths), -1, np.int32)
    for r, size in enumerate(sizes):
        for i in range(size):
            paths[r, i, : 1 + rng.integers(min(i + 1, depths))] = 0
    sizes, starts = np.array(sizes, np.int32), np.array(starts, np.int32)
    positions = int(starts.max()) + 64
    shapes = workspace(len(starts), nodes, depths, heads, 0, positions, blocks)
    space = Workspace(**{name: np.empty(*each) for name, each in shapes.items()})
    plan_attention(starts, paths, sizes, heads=heads, positions=positions, workspace=space)
    ranges = space.ranges.tolist()
    return space, [space.items[a:b] for a, b in zip(ranges, ranges[1:], strict=False)]


@pytest.mark.parametrize("heads", [1, 8, 16])
@pytest.mark.parametrize(
    "starts, sizes, nodes",
    [([0], [1], 1), ([40_000, 0, 130], [17, 0, 3], 17), ([8192] * 3, [33, 1, 12], 40)],
)
def test_the_plan_covers_every_key_once(starts, sizes, nodes, heads, rng):
    """Each unit meets its positions in order, whole splits each, whichever block has them."""
    parts = -(-heads // 8)
    space, blocks = planned(starts, sizes, nodes, 9, heads=heads, rng=rng)
    met = {}
    for r, unit, many, first, chunks, last, split, _ in np.concatenate(blocks).tolist():
        assert split_start.py_func(split) == first
        end = min(split_start.py_func(split + 1), first + CHUNK * chunks)
        for u in range(unit, unit + many):
            node_last = int(space.lasts[r, u // parts])
            assert last <= node_last
            met.setdefault((r, u), []).append((first, min(end - 1, node_last)))
    wanted = {(r, u) for r, size in enumerate(sizes) for u in range(size * parts)}
    assert set(met) == wanted
    for (r, u), spans in met.items():
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == space.lasts[r, u // parts]
        assert all(a[1] + 1 == b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_the_plan_shares_the_work_evenly(rng):
    """By the time that it estimates: no block has a tenth more than the mean."""
    _, blocks = planned([131_072], [17], 17, 9, blocks=132, rng=rng)
    times = [sum(PIECE + i[4] for i in block.tolist()) for block in blocks]
    assert max(times) <= 1.1 * np.mean(times)


def test_a_plan_of_more_runs_than_threads(rng):
    """Pieces and blocks go on from one window of runs to the next."""
    starts, sizes = [130, 0, 40_000] * 10, [3, 1, 2] * 10
    _, blocks = planned(starts, sizes, 3, 4, blocks=7, rng=rng)
    items = np.concatenate(blocks)
    for r, size in enumerate(sizes):
        mine = items[items[:, 0] == r]
        seen = mine[:, 2] * np.minimum(mine[:, 4] * CHUNK, mine[:, 5] + 1 - mine[:, 3])
        assert size * starts[r] < seen.sum() <= size * (starts[r] + 4)
    times = [sum(PIECE + i[4] for i in block.tolist()) for block in blocks]
    assert max(times) <= 1.1 * np.mean(times)


def test_an_empty_batch_has_an_empty_plan(rng):
    space, _ = planned([5, 9], [0, 0], 4, 3, rng=rng)
    assert not space.ranges.any() and (space.lasts == -1).all()


def test_splits_follow_each_other():
    of, start = split_of.py_func, split_start.py_func
    for s in range(of(262_144)):
        assert of(start(s)) == s == of(start(s + 1) - 1) and start(s) % CHUNK == 0
    assert of(EDGES[0]) == of(EDGES[0] - 1) + 1
