"""Linear layers of K2.6: memory-bound at few rows, compute-bound at a prompt's.

What is compared with is one matrix product for all rows, as quick as it is close; bits are the
business of the tests.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.linear import linear, workspace_floats
from ddtree_numba.spec import linear as spec
from ddtree_numba.spec.numerics import F32, widen

ROWS = (1, 9, 17, 33, 65, 129, 256, 1024)
FC = "k26_draft_fc"  # 616 MB, always the rows of one block


def product(x: np.ndarray, weight: np.ndarray, out_dtype: np.dtype | None = None) -> np.ndarray:
    return (widen(x) @ widen(weight).T).astype(out_dtype or x.dtype, copy=False)


def workspace(given: dict) -> dict:
    floats = workspace_floats(len(given["x"]), *given["weight"].shape)
    return dict(workspace=np.empty(max(floats, 1), F32))


SIZES = {
    f"{name}-T{rows}": dims | dict(T=rows)
    for name, dims in spec.CASES.items()
    for rows in ((8,) if name == FC else ROWS)
    if name.startswith("k26")
}
QUICK = SimpleNamespace(**{**vars(spec), "linear": product})


@pytest.mark.parametrize("case", cases(QUICK, SIZES))
def bench_linear(measure, case):
    measure(case, linear, more=workspace)
