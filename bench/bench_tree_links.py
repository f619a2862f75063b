"""First child and next sibling: one request and 64."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.tree_links import tree_links
from ddtree_numba.spec import tree_links as spec

SIZES = {
    f"k26-R{requests}-N{nodes}": dict(nodes=nodes, sizes=[nodes] * requests)
    for requests, nodes in ((1, 17), (1, 65), (64, 65), (1, 257))
}


@pytest.mark.parametrize("case", cases(spec, SIZES, smoke="star"))
def bench_tree_links(measure, case):
    measure(case, tree_links)
