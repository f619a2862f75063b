"""The head-wise products of absorbed MLA: queries into latent space, outputs back."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.absorb import absorb
from ddtree_numba.spec import absorb as spec


@pytest.mark.parametrize("case", cases(spec))
def bench_absorb(measure, case):
    measure(case, absorb)
