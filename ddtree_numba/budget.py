"""How many nodes to verify: a node is added only while it raises the expected tokens a second."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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

    def round_seconds(self, most: int) -> np.ndarray:
        """Of drafting and verifying 1 .. most rows."""
        return self.draft + self.verify_seconds(np.arange(1, most + 1))

    @classmethod
    def measure(
        cls,
        draft: Callable[[], object],
        verify: Callable[[int], object],
        seconds: Callable[[Callable[[], object]], float],
    ) -> "StepTimes":
        """Time the two steps by `seconds(call)`; verifying is made monotone in the width."""
        times = np.maximum.accumulate([seconds(partial(verify, rows)) for rows in WIDTHS])
        return cls(seconds(draft), WIDTHS, tuple(times.tolist()))


def best_sizes(scores: Any, sizes: Any, times: StepTimes, ops: Any) -> Any:
    """Nodes, root included, worth verifying of each tree that was built best first: int32 [R].

    `scores` float32[R,N] are the nodes' log-probabilities. With n nodes beside the root, a round
    emits 1 + sum exp(score) tokens in expectation and costs draft + verify(n + 1). The first node
    that does not raise the ratio ends the tree (CaDDTree, arXiv 2606.01813).
    """
    xp = ops.xp
    tokens = xp.cumsum(xp.exp(scores.astype(xp.float64)), axis=1)  # the root's score is 0: 1 token
    rate = tokens / ops.constant(StepTimes.round_seconds, times, scores.shape[1])
    rises = xp.cumprod(rate[:, 1:] > rate[:, :-1], axis=1)
    return xp.minimum(1 + rises.sum(axis=1), sizes).astype(xp.int32)
