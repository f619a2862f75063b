"""Processes that have a GPU each: they are started, what they gather is passed on, and they end."""

import importlib
import multiprocessing
import os
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

DEADLINE = 540  # seconds of all ranks together
# Multicast over NVLink is not to be had on every machine; the methods compared use none.
DEFAULTS = dict(NCCL_NVLS_ENABLE="0")


@dataclass
class Group:
    """A rank's end of what `serve` passes on; all that `PeerComm` asks of a group of processes."""

    rank: int
    world: int
    connection: Connection
    failure: None = None

    def gather(self, payload: bytes) -> list[bytes]:
        """What every rank gave, in rank order; a barrier as well."""
        self.connection.send(payload)
        return self.connection.recv()

    def slowest(self, seconds: float) -> float:
        return max(map(float, self.gather(repr(seconds).encode())))


def work(group: Group, options: Any, task: str) -> None:
    """A process's main function; an error goes to the parent, which ends the others."""
    try:
        module = importlib.import_module(task)
        group.connection.send(module.Rank(group, options).all())
    except Exception as error:
        group.connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise
    os._exit(0)  # whatever a graph or a communicator still holds


def serve(connections: list[Connection]) -> list[dict]:
    """Pass what the ranks gather between them until every rank has sent its result."""
    while True:
        given = []
        for rank, connection in enumerate(connections):
            try:
                given.append(connection.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} has ended") from None
            if isinstance(given[-1], Exception):
                raise RuntimeError(f"rank {rank}: {given[-1]}")
        if isinstance(given[0], dict):
            return given
        for connection in connections:
            connection.send(given)


def run(world: int, options: Any, task: str) -> list[dict]:
    """Every rank's results: what `all` of the task's `Rank` gives."""
    from ddtree_numba.model.comm_cuda import NCCL_ENVIRONMENT

    os.environ.update(NCCL_ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=work, args=(Group(rank, world, theirs), options, task), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    timer = threading.Timer(DEADLINE, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        return serve([mine for mine, _ in pipes])
    finally:
        timer.cancel()
        for process in processes:
            process.join(5)
            process.kill()
