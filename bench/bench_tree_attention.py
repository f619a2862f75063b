"""Tree attention of one request at 8k, 32k and 128k; the plan is made once a step, outside.

Partials share one workspace, as the layers of a step do; keys, queries and results are cold.
"""

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels import driver
from ddtree_numba.kernels.tree_attention import (
    Workspace,
    plan_attention,
    resident,
    tree_attention,
    workspace,
)
from ddtree_numba.spec import tree_attention as spec

SIZES = {
    f"k26-{start // 1024}k-N{nodes}": spec.CASES["k26"]
    | dict(starts=[start], sizes=[nodes], N=nodes)
    for start, trees in {8192: (1, 9, 17), 32_768: (1, 9, 17, 33), 131_072: (1, 9, 17)}.items()
    for nodes in trees
}


def blocks(units: int, width: int, latent: int) -> int:
    try:
        kinds = "MULTIPROCESSOR_COUNT", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"
        return resident(units, width, latent, *(driver.attribute(0, kind) for kind in kinds))
    except Exception:  # no device, or no driver: the CPU executor takes any number
        return 3


def planned(given):
    requests, nodes, heads, width = given["q"].shape
    depths, positions = given["paths"].shape[2], 64 * given["page_table"].shape[1]
    latent = given["latent"]
    most = blocks(nodes * -(-heads // 8), width, latent)
    shapes = workspace(requests, nodes, depths, heads, latent, positions, most)
    space = Workspace(**{name: np.empty(*each) for name, each in shapes.items()})
    batch = {name: given[name] for name in ("starts", "paths", "sizes")}
    plan_attention(**batch, heads=heads, positions=positions, workspace=space)
    return dict(workspace=space)


def further(given, rng):
    """Other memory with the same keys and queries; all else is shared by all copies."""
    return given | {name: given[name].copy() for name in ("pages", "q", "scratch")}


@pytest.mark.parametrize("case", cases(spec, SIZES, smoke="one_head"))
def bench_tree_attention(measure, case):
    measure(case, tree_attention, vary=further, more=planned)
