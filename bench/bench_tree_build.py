"""Best-first trees: one request and 64, budgets that verify uses, the largest tree."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.spec import tree_build as spec

SIZES = {
    "k26-R1-B16": dict(requests=1, depths=7, k=16, budget=16),
    "k26-R1-B32": dict(requests=1, depths=7, k=32, budget=32),
    "k26-R1-B64": dict(requests=1, depths=7, k=16, budget=64),
    "k26-R64-B64": dict(requests=64, depths=7, k=16, budget=64),
    "k26-R1-B64-ties": dict(requests=1, depths=7, k=16, budget=64, values=4),
    "k26-R1-B256": dict(requests=1, depths=15, k=64, budget=256),
}


@pytest.mark.parametrize("case", cases(spec, SIZES, smoke="more_budget_than_nodes"))
def bench_tree_build(measure, case):
    measure(case, tree_build)
