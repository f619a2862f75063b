"""What the verify forward takes of a tree: ancestor words; paths and positions in one launch."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.tree_mask import tree_mask, tree_paths
from ddtree_numba.spec import tree_mask as spec
from ddtree_numba.spec.numerics import Cost

SIZES = {
    f"k26-R{requests}-N{nodes}": dict(nodes=nodes, sizes=[nodes] * requests)
    for requests, nodes in ((1, 17), (1, 65), (64, 65), (1, 257))
}
WIDTH = 16  # of the largest tree: 15 drafted positions


def paths_and_positions(parents, depths, sizes, starts):
    """(paths, positions) of full trees."""
    return spec.tree_paths(parents, depths, sizes, WIDTH), starts[:, None] + depths


def path_inputs(case, rng):
    """Full trees, no deeper than WIDTH - 1."""
    shape = len(case["sizes"]), case["nodes"]
    parents, depths = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    for r, i in np.ndindex(shape):
        if i:
            parent = int(rng.integers(0, i))
            parents[r, i] = parent if depths[r, parent] + 1 < WIDTH else 0
            depths[r, i] = depths[r, parents[r, i]] + 1
    starts = rng.integers(0, 1 << 17, shape[0], np.int32)
    sizes = np.full(shape[0], shape[1], np.int32)
    return dict(parents=parents, depths=depths, sizes=sizes, starts=starts)


PATHS = SimpleNamespace(
    __name__="tree_mask.paths_and_positions",
    paths_and_positions=paths_and_positions,
    CASES={"small": dict(nodes=20, sizes=[20, 20])},
    inputs=path_inputs,
    cost=lambda case: Cost(len(case["sizes"]) * (case["nodes"] * (12 + 4 * WIDTH) + 8), 0),
    TOLERANCE=0,
)


def paths_kernel(parents, depths, sizes, starts, *, out, stream):
    paths, positions = out
    more = dict(starts=starts, positions=positions)
    tree_paths(parents, depths, sizes, out=paths, **more, stream=stream)


@pytest.mark.parametrize("case", cases(spec, SIZES, smoke="random_of_65"))
def bench_tree_mask(measure, case):
    measure(case, tree_mask)


@pytest.mark.parametrize("case", cases(PATHS, SIZES, smoke="small"))
def bench_tree_paths(measure, case):
    measure(case, paths_kernel)
