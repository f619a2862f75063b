"""Accepted rows of all 61 layers into their pages, and the drafter's context."""

from types import SimpleNamespace

import pytest

from bench.cases import cases
from ddtree_numba.kernels.cache_commit import cache_commit
from ddtree_numba.spec import cache_commit as spec

INDICES = ("starts", "nodes", "counts")
SIZES = {
    f"{requests}-requests-{rows}-rows": dict(
        layers=61, page=64, starts=[61] * requests, counts=[rows] * requests, nodes=65, width=576
    )
    for requests, rows in ((1, 1), (1, 5), (1, 8), (4, 5), (64, 5))
}
SIZES["drafter-512-rows"] = dict(layers=6, page=64, starts=[61], counts=[512], nodes=513, width=256)


def inputs(case, rng):
    given = spec.inputs(case, rng)
    return given | {name: given[name].astype("int32") for name in INDICES}


ON_DEVICE = SimpleNamespace(**vars(spec) | dict(inputs=inputs))


@pytest.mark.parametrize("case", cases(ON_DEVICE, SIZES, smoke="unequal"))
def bench_cache_commit(measure, case):
    measure(case, cache_commit, updates=("pages",))
