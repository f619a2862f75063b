"""How long the parts of a round take, and each kernel of a forward by its name.

On a GPU a part is a CUDA graph, replayed back to back; each replay starts from the same state,
which is written between two of them. Elsewhere it is called, and the time means little.

Of the kernels a forward is recorded, with all arrays that it made; then the launches of one name
and grid follow each other in a graph of their own, every layer's with its own weights. They may
overlap each other where in the step they would overlap their neighbours, so the sum of names is
near the step's time, not equal to it.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bench.timing import Launch, launches
from ddtree_numba.kernels.driver import three

WARM_SECONDS = 0.05
FEWEST = 3  # replays
BEYOND_L2 = 256 << 20  # bytes


def nothing() -> None:
    pass


class Clock:
    """Times calls on a backend; `rounds` is how many replays give a median.

    agreed: of ranks that replay together the slowest one's seconds, so that all replay as often.
    """

    def __init__(
        self, ops: Any, rounds: int, agreed: Callable[[float], float] = lambda seconds: seconds
    ) -> None:
        self.ops, self.rounds, self.agreed = ops, rounds, agreed
        self.graphs = hasattr(ops, "capture")
        self.pool = ops.new_pool() if self.graphs else None
        if self.graphs:
            with ops.active():
                self.beyond_l2 = ops.xp.zeros(BEYOND_L2 // 4, np.int32)
                self.total = ops.xp.zeros((), np.int64)

    def flush(self) -> None:
        """Read what fills L2; meanwhile the host queues what comes next."""
        if self.graphs:
            self.ops.xp.sum(self.beyond_l2, out=self.total)

    def seconds(self, call: Callable[[], object], before: Callable[[], None] = nothing) -> float:
        """The median of a call, `before` played ahead of each and not counted.

        The call also runs once by itself: that compiles and loads what it needs.
        """
        if not self.graphs:
            with self.ops.active():
                before()
                start = time.perf_counter()
                call()
                return time.perf_counter() - start
        with self.ops.active(self.pool):
            before()
            call()
            graph = self.ops.capture(call)
            return median(self._replayed(graph, before))

    def _replayed(self, graph: Any, before: Callable[[], None]) -> list[float]:
        """Queued without waiting, so that the host is ahead of the GPU; the first ones warm up."""
        ops, marks = self.ops, []
        before()
        once = max(self.agreed(ops.graph_seconds(graph)), 1e-6)
        warm = min(int(WARM_SECONDS / once) + 1, 200)
        for _ in range(warm + max(self.rounds, FEWEST)):
            before()
            begin = ops.mark()
            ops.launch(graph)
            marks.append((begin, ops.mark()))
        ops.finish()
        return [ops.seconds_between(*both) for both in marks[warm:]]

    def kernels(self, call: Callable[[], object]) -> list[dict]:
        """Name, grid, launches and seconds of a call's kernels, the longest first.

        Empty without graphs. One kernel with two grids, as of weights of two shapes, is two rows.

        Nothing may be in the call that leaves a workspace to be finished by another kernel.
        """
        if not self.graphs:
            return []
        with self.ops.active(self.ops.new_pool()), launches() as launched:
            call()
        kinds: dict[tuple, list[Launch]] = {}
        for kernel, grid, arguments in launched:
            kinds.setdefault((kernel.name, three(grid)), []).append((kernel, grid, arguments))
        rows = [
            dict(
                name=name, grid=grid, launches=len(some), seconds=self.seconds(partial(play, some))
            )
            for (name, grid), some in kinds.items()
        ]
        return sorted(rows, key=lambda row: -row["seconds"])


def play(launched: list[Launch]) -> None:
    for kernel, grid, arguments in launched:
        kernel.launch(grid, *arguments)
