"""Lossless DDTree speculative decoding of Kimi K2.6.

from ddtree_numba import Engine, SamplingParams

engine = Engine.load()
for step in engine.generate(["def fibonacci(n):"], SamplingParams(max_new_tokens=64)):
    print(step.text, end="")
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_numba.engine import Engine
    from ddtree_numba.request import Increment, RoundTrace, Stats
    from ddtree_numba.sampling import SamplingParams

__all__ = ["Engine", "Increment", "RoundTrace", "SamplingParams", "Stats"]

_HOMES = {
    "Engine": "engine",
    "Increment": "request",
    "RoundTrace": "request",
    "SamplingParams": "sampling",
    "Stats": "request",
}


def __getattr__(name: str) -> object:
    """The public names, imported when they are first asked for, so that --help need not wait."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
