"""Ranks as processes: who starts them, who they are, and how they end.

`--tp N --ranks processes` starts N processes of the same command on this machine and watches them:
the command itself then decodes nothing. A launcher that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT starts them by itself, on one machine or several. Rank 0 owns standard
input, output and the signals; `led` says what the others do.
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddtree_numba.interrupts import Interrupted, Interrupts
from ddtree_numba.model.place import (
    LISTENER,
    NEWS,
    PARENT,
    Place,
    check_every,
    from_environment,
    gpus_are_shared,
    meeting_way,
    patience,
)
from ddtree_numba.options import UsageError, of_option
from ddtree_numba.screen import Screen, one_line

if TYPE_CHECKING:
    from ddtree_numba.model.watch import ProcessGroup

COMMAND = (sys.executable, "-m", "ddtree_numba.generate")
FAREWELL = 5.0  # seconds between the first end of a process and the last, before they are killed
PR_SET_PDEATHSIG = 1
WATCHED = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)  # by the parent, until ranks take them


def place_of(options: argparse.Namespace) -> Place | None:
    """This process's place among ranks that are processes, which sets --tp; None for one alone.

    UsageError names the option or variable that does not fit.
    """
    try:
        place = from_environment()
        patience()
        check_every()
        meeting_way()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if place is None:
        return None
    if options.ranks and place.parent is None:
        raise UsageError("--ranks has no effect where RANK is set: ranks are processes then")
    if options.tp not in (1, place.world):
        raise UsageError(f"--tp {options.tp}, but WORLD_SIZE {place.world}")
    options.tp = place.world
    return place if place.world > 1 else None


@contextlib.contextmanager
def group_at(place: Place | None) -> "Iterator[ProcessGroup | None]":
    """The ranks, met and watched, while rank 0 runs the command; None for one alone."""
    if place is None:
        yield None
        return
    from ddtree_numba.model.watch import ProcessGroup

    tie_to_parent(place)
    with ProcessGroup(place, one_line) as group:
        yield group


def tie_to_parent(place: Place) -> None:
    """Die with the process that started this one, even if that is killed; take signals again."""
    if place.parent is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != place.parent:  # it has died before
        Screen().error(f"error: {PARENT} {place.parent} is not the parent of this rank")
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


def follow(options: argparse.Namespace, place: Place, interrupts: Interrupts) -> int:
    """What every rank but 0 does -> exit code. It prints nothing that rank 0 can print."""
    from ddtree_numba.model.comm_tcp import LeaderLost, RankLost
    from ddtree_numba.model.watch import ProcessGroup

    screen, joined = Screen(quiet=True), False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides what a signal means
    tie_to_parent(place)
    try:
        with ProcessGroup(place, one_line) as group:
            joined = True
            from ddtree_numba import led, prepare

            command = prepare.prepare(options, screen, interrupts)
            led.follow(group, command.sources())
        return 0
    except Exception as error:
        lost = isinstance(error, RankLost)
        if options.debug and not lost:
            traceback.print_exc()
        if not joined and not lost or isinstance(error, LeaderLost) and place.parent is None:
            screen.error(f"error: rank {place.rank}: {one_line(error)}")
        return 1


class Launcher:
    """The parent of the ranks: starts them, tells rank 0 of the first that ends, ends the rest."""

    def __init__(self, argv: Sequence[str], world: int, command: Sequence[str] = COMMAND) -> None:
        self.told, self.killed = "", False
        listener = socket.create_server(("127.0.0.1", 0), backlog=2 * world)
        reader, self.news = os.pipe()
        shared = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "DDTREE_NUMBA_JOB": secrets.token_hex(16),
            PARENT: str(os.getpid()),
        }
        inherited = {LISTENER: str(listener.fileno()), NEWS: str(reader)}
        left = {name: value for name, value in os.environ.items() if name not in inherited}
        self.ranks: list[subprocess.Popen] = []
        try:
            for rank in range(world):
                if signal.sigpending() & {signal.SIGINT, signal.SIGTERM}:
                    raise Interrupted
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({} if rank else inherited)
                apart = subprocess.DEVNULL if rank else None
                self.ranks.append(
                    subprocess.Popen(
                        [*command, *argv],
                        env=left | shared | own,
                        stdin=apart,
                        stdout=apart,
                        pass_fds=() if rank else (listener.fileno(), reader),
                    )
                )
        except BaseException:
            os.close(self.news)
            for started in self.ranks:
                started.kill()
                started.wait()
            raise
        finally:
            listener.close()
            os.close(reader)

    def wait(self) -> int:
        """Until all have ended -> exit code: rank 0's, or 1 if it was killed.

        On a second signal rank 0 ends at once; if it cannot, all are killed, and the code is that
        of the signal.
        """
        deadline, heard = float("inf"), list[int]()
        while any([rank.poll() is None for rank in self.ranks]):  # a list: all are polled
            self.tell()
            if self.told or self.ranks[0].returncode is not None:
                deadline = min(deadline, time.monotonic() + FAREWELL)
            left = deadline - time.monotonic()
            if left <= 0:
                self.killed = True
                self.told = self.told or f"rank 0 did not end within {FAREWELL:g} s of a signal"
                for rank in self.ranks:
                    rank.kill()  # does nothing to one that has ended
            happened = signal.sigtimedwait(WATCHED, min(max(left, 0.1), 3600))
            if happened is None or happened.si_signo == signal.SIGCHLD:
                continue
            heard.append(happened.si_signo)
            if len(heard) > 1:
                deadline = min(deadline, time.monotonic() + FAREWELL)
            if happened.si_code <= 0:  # not from a terminal, which signals rank 0 as well
                self.ranks[0].send_signal(happened.si_signo)
        self.tell()
        code = self.ranks[0].returncode
        if code < 0:
            Screen().error(f"error: {self.told if self.killed else how_ended(0, code)}")
            return 128 + heard[-1] if self.killed and len(heard) > 1 else 1
        return code

    def tell(self) -> None:
        """Rank 0 of the first other rank that ended badly; remember it."""
        if self.told:
            return
        for number, rank in enumerate(self.ranks):
            if rank.returncode:
                self.told = how_ended(number, rank.returncode)
                with contextlib.suppress(OSError):
                    os.write(self.news, self.told.encode() + b"\n")
                return


def how_ended(rank: int, code: int) -> str:
    """A process's end in words."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"rank {rank} was killed by {name}"


def start_numpy() -> None:
    """Threads that it may start are to leave signals to `launch`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        import numpy  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def on_gpus(options: argparse.Namespace) -> bool:
    """Are ranks to be processes with a GPU each? By default they are, where there are enough.

    UsageError if cuda was asked for, and there are fewer GPUs than ranks.
    """
    if options.tp == 1 or options.ranks == "threads":
        return False
    start_numpy()
    from ddtree_numba.backends import name_of, visible_gpus

    try:
        cuda = name_of(options.backend, options.dtype) == "cuda"
        gpus = visible_gpus() if cuda else 0
    except ValueError as error:
        raise of_option(error) from None
    enough = gpus >= options.tp or cuda and gpus_are_shared()
    if options.backend == "cuda" and not enough:
        raise UsageError(
            f"--tp {options.tp}: {gpus} GPUs are visible; --ranks threads runs all ranks on one"
        )
    return cuda and enough


def check(options: argparse.Namespace, interrupts: Interrupts) -> None:
    """Refuse, before any rank is started, what ranks would refuse of options and configuration."""
    from ddtree_numba import prepare

    prepare.prepare(options, Screen(quiet=True), interrupts)


def launch(argv: Sequence[str], world: int, command: Sequence[str] = COMMAND) -> int:
    """Run the command as `world` ranks on this machine -> exit code.

    A signal that comes while they start ends those that have, and is then handled as ever.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # none is missed while they start
    try:
        launcher = Launcher(argv, world, command)
        with os.fdopen(launcher.news, "wb", buffering=0):
            return launcher.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
