"""SwiGLU of the dense layer and of the shared expert, one rank's share."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.swiglu import swiglu
from ddtree_numba.spec import swiglu as spec


@pytest.mark.parametrize("case", cases(spec))
def bench_swiglu(measure, case):
    measure(case, swiglu)
