"""A tree's size by step times: one request and 64."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.tree_size import tree_size
from ddtree_numba.spec import tree_size as spec


@pytest.mark.parametrize("case", cases(spec, smoke="unequal"))
def bench_tree_size(measure, case):
    measure(case, tree_size)
