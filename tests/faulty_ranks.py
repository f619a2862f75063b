"""The command with a fault in one of its ranks: python -m tests.faulty_ranks RANK POINT FAULT ...

Every process runs it; the one whose RANK it is comes upon the fault where it gets to POINT.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np

from ddtree_numba import generate, load, processes
from ddtree_numba.model import backend, watch
from ddtree_numba.model.rank import Rank

# point -> (where, name, which call of it)
POINTS: dict[str, tuple[Any, str, int]] = {
    "rendezvous": (watch, "meet", 1),
    "load": (load, "load_target", 1),
    "prefill": (Rank, "forward", 1),
    "draft": (Rank, "candidates", 1),
    "verify": (Rank, "choose", 2),
    "commit": (Rank, "commit", 4),
}


def out_of_memory() -> None:
    raise MemoryError("3 GiB")


def interrupt() -> None:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.3)


def noise() -> None:
    """From here on this rank ranks the drafter's candidates otherwise."""
    right = backend.draft_topk

    def other(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        return right(-logits, k)

    backend.draft_topk = other


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": out_of_memory,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(600),
    "interrupt": interrupt,
    "noise": noise,
}


def plant(point: str, fault: Callable[[], object]) -> None:
    where, name, which = POINTS[point]
    before, calls = getattr(where, name), 0

    @wraps(before)
    def faulty(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == which:
            fault()
        return before(*args, **named)

    setattr(where, name, faulty)


if __name__ == "__main__":
    rank, point, fault, *argv = sys.argv[1:]
    again = (sys.executable, "-m", "tests.faulty_ranks", rank, point, fault)
    processes.launch = partial(processes.launch, command=again)
    if os.environ.get("RANK") == rank:
        plant(point, FAULTS[fault])
    sys.exit(generate.main(argv))
