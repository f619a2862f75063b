"""How ranks that are processes end: killed, failing, silent, interrupted; nobody is left behind."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.command import ROOT
from tests.faulty_ranks import POINTS
from tests.process_runs import APART, LIMIT, PROMPT, Run, faulty, launched


def test_c02_a_launched_rank_fails_and_rank_0_says_so():
    leader, other = launched(2, *PROMPT)
    while not leader.process.stdout.read(1):
        assert leader.process.poll() is None
    other.process.kill()
    assert leader.end()[::2] == (1, "error: rank 1 is gone\n")
    other.end()


@pytest.mark.parametrize(("rank", "point"), [(1, "load"), (0, "verify")])
def test_c02_a_killed_rank_ends_the_run(rank: int, point: str):
    ran = faulty(rank, point, "kill")
    code, _, err = ran.end()
    assert (code, err) == (1, f"error: rank {rank} was killed by SIGKILL\n")
    assert ran.seconds < LIMIT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("world", [2, 4])
def test_c02_a_killed_rank_ends_the_run_every_time(world: int, point: str):
    for turn in range(20):
        rank = turn % world
        ran = faulty(rank, point, "kill", "--tp", str(world))
        code, _, err = ran.end()
        assert (code, err) == (1, f"error: rank {rank} was killed by SIGKILL\n")
        assert ran.seconds < LIMIT


def test_c02_the_first_error_is_shown():
    code, _, err = faulty(1, "load", "raise").end()
    assert (code, err) == (1, "error: rank 1: out of memory: 3 GiB\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", [point for point in POINTS if point != "rendezvous"])
def test_c02_the_first_error_is_shown_wherever_it_was(rank: int, point: str):
    code, _, err = faulty(rank, point, "raise").end()
    whose = f"rank {rank}: " if rank else ""
    assert (code, err) == (1, f"error: {whose}out of memory: 3 GiB\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["stop", "sleep"])
@pytest.mark.parametrize("point", POINTS)
def test_c02_a_rank_that_stands_still_ends_the_run(fault: str, point: str):
    ran = faulty(1, point, fault, env={"DDTREE_NUMBA_RANK_SECONDS": "2"})
    code, _, err = ran.end()
    missing = "of 2 did not reach rank 0" if point == "rendezvous" else "has not answered for 2 s"
    assert code == 1 and err.startswith(f"error: rank 1 {missing}") and err.count("\n") == 1
    assert ran.seconds < LIMIT + 5


def test_s34_ranks_that_come_to_differ_are_told():
    """A rank whose drafter ranks otherwise would verify another tree in the same shape."""
    code, _, err = faulty(1, "rendezvous", "noise", env={"DDTREE_NUMBA_CHECK_RANKS": "1"}).end()
    assert code == 1
    assert err == "error: round 1: rank 1 holds other tokens or hidden states than rank 0\n"


def check_interrupted(rank: int, point: str) -> None:
    code, out, err = faulty(rank, point, "interrupt").end()
    assert code == 130 and err.count("\n") == 1
    early = point in ("rendezvous", "load")
    assert err.startswith("interrupted before anything" if early else "cancelled: ")


@pytest.mark.parametrize("point", ["load", "commit"])
def test_c07_ctrl_c_ends_all_ranks(point: str):
    check_interrupted(1, point)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_c07_ctrl_c_ends_all_ranks_anywhere(rank: int, point: str):
    check_interrupted(rank, point)


def test_c07_a_second_signal_ends_a_run_whose_rank_0_stands_still():
    ran = faulty(0, "commit", "stop")
    while not any(") T " in Path(f"/proc/{one}/stat").read_text() for one in ran.left()):
        assert ran.process.poll() is None
    for _ in range(2):
        ran.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    code, _, err = ran.end(15)
    assert (code, err) == (130, "error: rank 0 did not end within 5 s of a signal\n")


def test_c07_ranks_end_with_their_parent():
    ran = Run(*PROMPT, *APART)
    assert ran.process.stdout.read(1)
    ran.process.kill()
    assert ran.end()[0] == -signal.SIGKILL


def test_c07_ctrl_c_of_a_terminal_is_heard_once():
    """It reaches parent and ranks alike; heard twice, it would end the answer at once."""
    main, terminal = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    argv = [sys.executable, "-m", "ddtree_numba.generate", *PROMPT, *APART, "--verbose"]
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=own_terminal,
    ) as process:
        assert process.stdout and process.stderr and process.stdout.read(1)
        os.write(main, b"\x03")
        _, err = process.communicate(timeout=30)
    os.close(main)
    os.close(terminal)
    assert process.returncode == 130
    assert b"\ncancelled: " in err and b"\nranks: 2" in err
