"""Gate, up and SwiGLU of the dense layer and of the shared expert, one rank's share.

What is compared with is one matrix product for all rows, as in `bench_linear.py`.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.linear_swiglu import linear_swiglu, workspace
from ddtree_numba.spec import linear_swiglu as spec
from ddtree_numba.spec.numerics import widen
from ddtree_numba.spec.swiglu import swiglu

ROWS = (1, 9, 17, 33, 65, 1024)


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return swiglu((widen(x) @ widen(weight).T).astype(x.dtype))


def space(given: dict) -> dict:
    shape, dtype = workspace(len(given["x"]), *given["weight"].shape)
    return dict(workspace=np.empty(shape, dtype))


QUICK = SimpleNamespace(**{**vars(spec), "linear_swiglu": product})


@pytest.mark.parametrize("case", cases(QUICK, rows=ROWS))
def bench_linear_swiglu(measure, case):
    measure(case, linear_swiglu, more=space)
