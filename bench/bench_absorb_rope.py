"""Queries of absorbed MLA, one rank's heads: the product and the rotation beside it."""

from types import SimpleNamespace

import pytest

from bench.bench_rope import table
from bench.cases import cases
from ddtree_numba.kernels.absorb_rope import absorb_rope
from ddtree_numba.spec import absorb_rope as spec


def inputs(case, rng):
    given = spec.inputs(case, rng)
    return given | dict(positions=given["positions"].astype("int32"))


def launch(inv_freq, amplitude, **given):
    absorb_rope(**given)


INDEXED = SimpleNamespace(**vars(spec) | dict(inputs=inputs))


@pytest.mark.parametrize("case", cases(INDEXED))
def bench_absorb_rope(measure, case):
    measure(case, launch, more=table)
