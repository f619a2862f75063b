"""All-reduce on one GPU: the ordered sum of what an all-gather brought; methods on the CPU alone.

What a call costs lies between the GPUs: `multi_gpu.py` measures it.
"""

from typing import Any

import numpy as np
import pytest

from bench.cases import cases
from bench.ranks_on_cpu import play
from ddtree_numba.kernels.all_reduce import METHODS, launches
from ddtree_numba.kernels.all_reduce_gathered import sum_gathered
from ddtree_numba.spec import all_reduce as spec


@pytest.mark.parametrize("case", cases(spec, smoke="two_ranks"))
def bench_all_reduce(measure, case):
    measure(case, sum_gathered)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases(spec, sizes={}, smoke="two_ranks"))
def bench_all_reduce_methods(measure, case, method):
    def ranks(partials: np.ndarray, *, out: np.ndarray, stream: Any) -> None:
        play(launches, partials, method, out, out.nbytes)

    measure(case, ranks)
