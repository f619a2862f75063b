"""The expert block of one of eight ranks: grouping, gate and up, down, combine, uniform routing.

Experts repeat eight that differ, at addresses of their own: the reference stays affordable, and
multiplies the rows of an expert at once.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels import moe_int4 as kernels
from ddtree_numba.kernels.moe_records import pack, records_shape, refuse
from ddtree_numba.spec import moe_int4 as spec
from ddtree_numba.spec.numerics import BF16, F32, widen
from ddtree_numba.spec.swiglu import swiglu

DISTINCT = 8
ROWS = (1, 9, 17, 33, 65, 1024)


def inputs(case, rng):
    count = case["E"]
    given = spec.inputs(case | dict(E=min(count, DISTINCT)), rng)

    def repeated(matrix):
        words, scale = (np.resize(a, (count, *a.shape[1:])) for a in (matrix.packed, matrix.scale))
        return replace(matrix, packed=words, scale=scale)

    weights = {name: repeated(given[name]) for name in ("gate_up", "down")}
    return given | weights | routing(case, rng)


def routing(case, rng):
    picks = rng.random((case["T"], case["E"])).argsort(1)[:, : case["k"]].astype(np.int32)
    return dict(experts=picks)


def reference(x, experts, weights, gate_up, down, base):
    total = np.zeros(x.shape, F32) if base is None else widen(base).copy()
    for expert in range(min(DISTINCT, len(gate_up.packed))):
        token, pick = np.nonzero(experts % DISTINCT == expert)
        hidden = swiglu(widen(x[token]) @ gate_up.dense(expert).T).astype(BF16)
        products = weights[token, pick, None] * (widen(hidden) @ down.dense(expert).T)
        np.add.at(total, token, products)
    return total.astype(x.dtype)


def block():
    """The kernel on the arguments of the specification: the first call packs the experts."""
    made: dict = {}

    def packed(matrix, gated, zeros):
        count = len(matrix.packed)
        faults = zeros(count, np.int32)
        out = zeros(records_shape(count, matrix.shape, gated), np.uint32)
        records = pack(matrix, gated, faults=faults, out=out)
        refuse("experts", np.asarray(faults.tolist()))
        return records

    def run(x, experts, weights, gate_up, down, base, *, out, stream):
        if not made:
            zeros = np.zeros
            if not isinstance(x, np.ndarray):
                from cupy import zeros
            first, second = packed(gate_up, True, zeros), packed(down, False, zeros)
            space = kernels.workspace(*experts.shape, second, zeros)
            made.update(gate_up=first, down=second, workspace=space)
        kernels.moe_int4(x, experts, weights, base=base, **made, out=out, stream=stream)

    return run


BENCHED = SimpleNamespace(
    __name__=spec.__name__,
    CASES=spec.CASES,
    TOLERANCE=spec.TOLERANCE,
    inputs=inputs,
    cost=spec.cost,
    moe_int4=reference,
)


@pytest.mark.parametrize("case", cases(BENCHED, rows=ROWS, smoke="base"))
def bench_moe_int4(measure, case):
    def vary(given, rng):
        rows = {name: given[name].copy() for name in ("x", "weights")}
        return given | rows | routing(case.dims, rng)

    measure(case, block(), vary=vary)
