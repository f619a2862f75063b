"""How a launch is timed: a captured sequence over rotating copies, divided by its length.

A single launch of a few microseconds is hidden by the events around it, and a second launch on the
same arrays finds them in L2. So each launch of a sequence takes another copy of inputs and outputs,
a copy comes round again after twice the L2 cache has passed, and the sequence is long
against both the events' error and what stays unwritten in L2 at its end.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ddtree_numba.kernels.launch import Kernel

ROUNDS = 30
PASSED_L2 = 2  # times the L2 size between two uses of a copy
SEQUENCE_L2 = 16  # times the L2 size in a sequence: what its end leaves in L2 is a sixteenth
FEWEST, MOST = 16, 1024  # launches of a sequence
COPY_BYTES = 16 << 30  # of all copies together

Launch = tuple[Kernel, Any, tuple]  # a kernel, its grid, its arguments


@dataclasses.dataclass(frozen=True)
class Plan:
    copies: int
    launches: int


def plan(touched: int, footprint: int, l2_bytes: int) -> Plan:
    """Numbers of copies and launches for a call that touches so many bytes of its arrays.

    Where memory or MOST forbids enough copies, each is used once: the caches are flushed before
    every replay of the sequence.
    """
    touched = max(touched, 1)
    wanted = math.ceil(PASSED_L2 * l2_bytes / touched) + 1
    copies = max(min(wanted, MOST, COPY_BYTES // max(footprint, 1)), 2)
    if copies < wanted:
        return Plan(copies, copies)
    launches = min(max(math.ceil(SEQUENCE_L2 * l2_bytes / touched), FEWEST), MOST)
    return Plan(copies, max(launches, copies))


class Clock:
    """The timer of pytest-benchmark: seconds that rounds have added, instead of the host's time."""

    __name__ = "device_clock"

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with function(array) for every array in dictionaries, tuples and dataclasses."""
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(mapped(function, each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: mapped(function, getattr(value, f.name)) for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, type) or not (hasattr(value, "nbytes") and np.ndim(value)):
        return value  # a type of numbers has these attributes too
    return function(value)


def arrays(value: Any) -> list:
    """All arrays in `value`, in order."""
    found: list = []
    mapped(lambda array: found.append(array) or array, value)
    return found


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """The launches inside, in order, with their arguments, which they keep alive."""
    seen: list[Launch] = []
    original = Kernel.launch

    def launch(self: Kernel, grid: Any, *arguments: Any, stream: Any = None) -> None:
        seen.append((self, grid, arguments))
        original(self, grid, *arguments, stream=stream)

    Kernel.launch = launch  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Kernel.launch = original  # type: ignore[method-assign]
