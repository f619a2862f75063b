"""How many nodes to verify: a node is added only while it raises the expected tokens a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

WIDTHS = (1, 2, 4, 8, 16, 32, 65)  # rows at which the verify step is timed
MAX_BUDGET = 256
AUTO_BUDGET = 64  # the largest tree that `auto` weighs: steps are timed up to there


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of drafting, and of verifying `widths` rows (the root is one of them)."""

    draft: float
    widths: tuple[int, ...]
    verify: tuple[float, ...]

    def verify_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Linear between the measured widths, and on beyond the last one."""
        widths, times = np.array(self.widths, float), np.array(self.verify)
        slope = (times[-1] - times[-2]) / (widths[-1] - widths[-2])
        beyond = np.maximum(rows - widths[-1], 0) * slope
        return np.interp(rows, widths, times) + beyond

    @classmethod
    def measure(cls, draft: Callable[[], object], verify: Callable[[int], object]) -> "StepTimes":
        """Time the two steps; the best of three calls each, made monotone in the width."""

        def seconds(call: Callable[[], object]) -> float:
            spans = []
            for _ in range(3):
                begin = time.perf_counter()
                call()
                spans.append(time.perf_counter() - begin)
            return min(spans)

        times = np.maximum.accumulate([seconds(partial(verify, rows)) for rows in WIDTHS])
        return cls(seconds(draft), WIDTHS, tuple(times.tolist()))


def best_size(scores: np.ndarray, size: int, times: StepTimes) -> int:
    """Nodes, root included, worth verifying of a tree built best first.

    `scores` float32[N] are the nodes' log-probabilities. With n nodes beside the root, a round
    emits 1 + sum exp(score) tokens in expectation and costs draft + verify(n + 1). The first node
    that does not raise the ratio ends the tree (CaDDTree, arXiv 2606.01813).
    """
    tokens = np.cumsum(np.exp(scores[:size].astype(np.float64)))  # the root's score is 0: one token
    seconds = times.draft + times.verify_seconds(np.arange(1, size + 1))
    rate = tokens / seconds
    worse = np.flatnonzero(rate[1:] <= rate[:-1])
    return int(worse[0]) + 1 if len(worse) else size
