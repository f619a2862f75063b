"""The walk along the target's tokens: one request and 64."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.spec import tree_accept as spec

SIZES = {
    f"k26-R{requests}-N{nodes}": dict(nodes=nodes, sizes=[nodes] * requests, tokens=3)
    for requests, nodes in ((1, 17), (1, 65), (64, 65), (1, 257))
}


@pytest.mark.parametrize("case", cases(spec, SIZES, smoke="duplicate_siblings"))
def bench_tree_accept(measure, case):
    measure(case, tree_accept)
