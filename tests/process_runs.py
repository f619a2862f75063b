"""Commands whose ranks are processes, and what is left of them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.command import ROOT

MARK = "DDTREE_NUMBA_TEST_MARK"  # in the environment of all processes of a run
PROMPT = ["import unittest", "--max-new-tokens", "40", "--budget", "8", "--ignore-eos"]
APART = ["--ranks", "processes", "--tp", "2"]
LIMIT = 10.0  # seconds from a fault to the end of all processes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Run:
    """A command of its own, and all processes that come from it."""

    def __init__(self, *argv: str, module: str = "ddtree_numba.generate", env=None) -> None:
        self.mark, self.begin = uuid.uuid4().hex, time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            cwd=ROOT,
            env=os.environ | {MARK: self.mark} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, limit: float = 60) -> tuple[int, str, str]:
        """Exit code and both streams; no process is left, or it is killed and the test fails."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is left, then
            self.process.wait(limit)
        self.seconds = time.monotonic() - self.begin
        left = self.left()
        for one in left:
            os.kill(one, signal.SIGKILL)
        out, err = self.process.communicate()
        assert not left, f"processes are left; {err}"
        return self.process.returncode, out, err

    def left(self) -> list[int]:
        """Processes of this run that still are, after a moment for those that are ending."""
        for _ in range(20):
            found = []
            for folder in Path("/proc").iterdir():
                try:
                    environ = (folder / "environ").read_bytes() if folder.name.isdecimal() else b""
                except OSError:
                    continue
                if f"{MARK}={self.mark}".encode() in environ:
                    found.append(int(folder.name))
            if not found:
                return []
            time.sleep(0.05)
        return found


def faulty(rank: int, point: str, fault: str, *argv: str, env=None) -> Run:
    return Run(
        str(rank), point, fault, *PROMPT, *APART, *argv, module="tests.faulty_ranks", env=env
    )


def launched(world: int, *argv: str) -> list[Run]:
    """The ranks of a run, as a launcher would start them."""
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        Run(*argv, env=shared | {"RANK": str(rank), "LOCAL_RANK": "0"}) for rank in range(world)
    ]
