"""The drafter's heads between projection and attention: a block's, and the keys of new context."""

import pytest

from bench.bench_rope import table
from bench.cases import cases
from ddtree_numba.kernels.qk_norm_rope import qk_norm_rope
from ddtree_numba.spec import qk_norm_rope as spec


def launch(inv_freq, amplitude, *, out, stream, **given):
    qk_norm_rope(**given, out=out, stream=stream)


@pytest.mark.parametrize("case", cases(spec, rows=(8, 1024)))
def bench_qk_norm_rope(measure, case):
    measure(case, launch, more=table)
