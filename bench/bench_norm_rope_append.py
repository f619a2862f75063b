"""What stands between MLA's two projections: both norms and the shared key's rotation."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.bench_rope import table
from bench.cases import cases
from ddtree_numba.kernels.norm_rope_append import norm_rope_append
from ddtree_numba.spec import norm_rope_append as spec
from ddtree_numba.spec.numerics import BF16


def inputs(case, rng):
    """q as an argument: it is compared beside the scratch rows."""
    given = spec.inputs(case, rng)
    q = np.full((case["T"], case["Q"]), np.nan, BF16)
    return given | dict(positions=given["positions"].astype("int32"), q=q)


def expected(q, **given):
    q[...] = spec.norm_rope_append(**given)


def launch(q, inv_freq, amplitude, *, stream, **given):
    norm_rope_append(**given, out=q, stream=stream)


BOTH = SimpleNamespace(**vars(spec) | dict(inputs=inputs, norm_rope_append=expected))


@pytest.mark.parametrize("case", cases(BOTH))
def bench_norm_rope_append(measure, case):
    measure(case, launch, more=table, updates=("scratch", "q"))
