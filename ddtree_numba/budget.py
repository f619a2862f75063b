"""Step times by width, by which `spec/tree_size.py` says how many nodes to verify."""

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
