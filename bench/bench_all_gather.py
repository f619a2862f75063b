"""All-gather: its methods on the CPU alone; what they cost lies between GPUs, `multi_gpu.py`."""

from typing import Any

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels import simt
from ddtree_numba.kernels.all_gather import METHODS, launches
from ddtree_numba.kernels.all_reduce_call import CONTROL_WORDS
from ddtree_numba.kernels.peers import Peers, Room
from ddtree_numba.spec import all_gather as spec


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases(spec, sizes={}, smoke="three_ranks"))
def bench_all_gather(measure, case, method):
    def ranks(parts: np.ndarray, joined: bool, *, out: np.ndarray, stream: Any) -> None:
        room = Room.of(len(parts), *3 * [parts[0].nbytes])
        regions = tuple(np.zeros(room.words, np.uint32) for _ in parts)
        made = []
        for rank, x in enumerate(parts):
            words = np.zeros(CONTROL_WORDS, np.uint32), np.zeros(1, np.uint32)
            to = out if rank == 0 else np.empty_like(out)
            made += launches(x, Peers(rank, regions, room, *words), to, method)
        simt.run_together(
            [simt.Launch(kernel, grid, kernel.threads, a) for kernel, grid, a in made]
        )

    measure(case, ranks)
