"""RMS norm: hidden rows with their residual, query rows, latent rows."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.rms_norm import rms_norm
from ddtree_numba.spec import rms_norm as spec


@pytest.mark.parametrize("case", cases(spec, smoke="residual"))
def bench_rms_norm(measure, case):
    measure(case, rms_norm)
