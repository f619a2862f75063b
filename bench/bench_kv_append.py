"""Key rows into the scratch area: one layer, one rank."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.kv_append import kv_append
from ddtree_numba.spec import kv_append as spec


@pytest.mark.parametrize("case", cases(spec, axis="N"))
def bench_kv_append(measure, case):
    measure(case, kv_append, updates=("scratch",))
