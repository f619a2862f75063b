"""All-gather: its methods on the CPU alone; what they cost lies between GPUs, `multi_gpu.py`."""

from typing import Any

import numpy as np
import pytest

from bench.cases import cases
from bench.ranks_on_cpu import play
from ddtree_numba.kernels.all_gather import METHODS, launches
from ddtree_numba.spec import all_gather as spec


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases(spec, sizes={}, smoke="three_ranks"))
def bench_all_gather(measure, case, method):
    def ranks(parts: np.ndarray, joined: bool, *, out: np.ndarray, stream: Any) -> None:
        play(launches, parts, method, out, parts[0].nbytes)

    measure(case, ranks)
