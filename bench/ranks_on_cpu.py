"""One call of every rank on the CPU executor: the ranks' kernels wait for each other."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ddtree_numba.kernels import simt
from ddtree_numba.kernels.all_reduce_call import CONTROL_WORDS
from ddtree_numba.kernels.peers import Peers, Room

Launches = Callable[..., Iterable[tuple]]  # of `all_reduce` or `all_gather`


def play(launches: Launches, given: np.ndarray, method: str, out: np.ndarray, size: int) -> None:
    """given[r] of each rank by `method`; rank 0's result into out. size: bytes of a payload."""
    room = Room.of(len(given), *3 * [size])
    regions = tuple(np.zeros(room.words, np.uint32) for _ in given)
    made: list[tuple[Any, Any, tuple]] = []
    for rank, x in enumerate(given):
        words = np.zeros(CONTROL_WORDS, np.uint32), np.zeros(1, np.uint32)
        to = out if rank == 0 else np.empty_like(out)
        made += launches(x, Peers(rank, regions, room, *words), to, method)
    simt.run_together([simt.Launch(kernel, grid, kernel.threads, a) for kernel, grid, a in made])
