"""Step times: measured, kept monotone, and read between the widths."""

import time

import numpy as np

from ddtree_numba.budget import StepTimes


def test_times_between_and_beyond_the_measured_widths():
    step = StepTimes(0.0, (1, 3, 5), (1.0, 2.0, 4.0))
    assert step.verify_seconds(np.array([1, 2, 3, 4, 5, 6, 9])).tolist() == [1, 1.5, 2, 3, 4, 5, 8]


def test_measured_times_never_fall_with_the_width():
    spans = iter([3.0, 2.0, 4.0, 4.0, 1.0, 9.0, 8.0, 0.5])
    step = StepTimes.measure(lambda: None, lambda rows: None, lambda call: next(spans))
    assert step.draft == 0.5 and step.verify == (3.0, 3.0, 4.0, 4.0, 4.0, 9.0, 9.0)


def test_times_are_measured():
    def seconds(call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    step = StepTimes.measure(lambda: None, lambda rows: sum(range(20_000 // rows)), seconds)
    assert step.draft >= 0 and list(step.verify) == sorted(step.verify)
