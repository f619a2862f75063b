"""All-reduce on one GPU: the ordered sum of what an all-gather brought; methods on the CPU alone.

What a call costs lies between the GPUs: `multi_gpu.py` measures it.
"""

from typing import Any

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels import simt
from ddtree_numba.kernels.all_reduce import METHODS, launches
from ddtree_numba.kernels.all_reduce_call import CONTROL_WORDS
from ddtree_numba.kernels.all_reduce_gathered import sum_gathered
from ddtree_numba.kernels.peers import Peers, Room
from ddtree_numba.spec import all_reduce as spec


@pytest.mark.parametrize("case", cases(spec, smoke="two_ranks"))
def bench_all_reduce(measure, case):
    measure(case, sum_gathered)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases(spec, sizes={}, smoke="two_ranks"))
def bench_all_reduce_methods(measure, case, method):
    def ranks(partials: np.ndarray, *, out: np.ndarray, stream: Any) -> None:
        room = Room.of(len(partials), *3 * [out.nbytes])
        regions = tuple(np.zeros(room.words, np.uint32) for _ in partials)
        made = []
        for rank, x in enumerate(partials):
            words = np.zeros(CONTROL_WORDS, np.uint32), np.zeros(1, np.uint32)
            to = out if rank == 0 else np.empty_like(out)
            made += launches(x, Peers(rank, regions, room, *words), to, method)
        simt.run_together(
            [simt.Launch(kernel, grid, kernel.threads, a) for kernel, grid, a in made]
        )

    measure(case, ranks)
