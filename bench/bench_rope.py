"""Rotary positions of queries, the shared key, and the drafter's heads; the same bits as numpy."""

from types import SimpleNamespace

import pytest

from bench.cases import cases
from ddtree_numba.kernels.rope import rope, rope_table
from ddtree_numba.spec import rope as spec


def inputs(case, rng):
    given = spec.inputs(case, rng)
    return given | dict(positions=given["positions"].astype("int32"))


def table(given):
    longest = int(given["positions"].max(initial=0)) + 1
    return dict(table=rope_table(longest, given["inv_freq"], given["amplitude"]))


def turn(x, positions, inv_freq, interleaved, amplitude, *, table, out, stream):
    rope(x, positions, table, interleaved, out=out, stream=stream)


EXACT = SimpleNamespace(**vars(spec) | dict(inputs=inputs, TOLERANCE=0))


@pytest.mark.parametrize("case", cases(EXACT, smoke="heads"))
def bench_rope(measure, case):
    measure(case, turn, more=table)
