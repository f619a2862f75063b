"""The choice of experts: both launches, from hidden rows to experts and weights."""

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.router import router, workspace_words
from ddtree_numba.spec import router as spec

ROWS = (1, 9, 17, 33, 65, 129, 1024)


def space(given):
    return dict(
        workspace=np.zeros(workspace_words(*given["h"].shape, len(given["gate"])), np.int64)
    )


@pytest.mark.parametrize("case", cases(spec, rows=ROWS, smoke="tiny"))
def bench_router(measure, case):
    measure(case, router, more=space)
