"""The end of a round: one request and 64."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.round_advance import round_advance
from ddtree_numba.spec import round_advance as spec


def inputs(case, rng):
    """With the report among the arrays that are written in place."""
    given = spec.inputs(case, rng)
    return given | dict(out=np.zeros_like(given["nodes"]))


def in_place(out, **given):
    out[...] = spec.round_advance(**given)


ON_DEVICE = SimpleNamespace(**vars(spec) | dict(inputs=inputs, round_advance=in_place))


@pytest.mark.parametrize("case", cases(ON_DEVICE, smoke="unequal"))
def bench_round_advance(measure, case):
    measure(case, round_advance, updates=("roots", "starts", "room", "out"))
