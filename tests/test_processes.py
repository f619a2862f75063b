"""Ranks as processes over loopback, on the embedded model: their tokens, and how they end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from ddtree_numba.engine import Engine
from ddtree_numba.sampling import SamplingParams
from tests.command import ROOT, run
from tests.faulty_ranks import POINTS
from tests.test_comm_tcp import free_port
from tests.test_golden import LINES, SURE

MARK = "DDTREE_NUMBA_TEST_MARK"  # in the environment of all processes of a run
PROMPT = ["import unittest", "--max-new-tokens", "40", "--budget", "8", "--ignore-eos"]
APART = ["--ranks", "processes", "--tp", "2"]
LIMIT = 10.0  # seconds from a fault to the end of all processes


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

    def end(self) -> tuple[int, str, str]:
        """Exit code and both streams; no process is left, or it is killed and the test fails."""
        try:
            out, err = self.process.communicate(timeout=60)
            self.seconds = time.monotonic() - self.begin
        finally:
            left = self.left()
            for one in left:
                os.kill(one, signal.SIGKILL)
        assert not left, "processes are left"
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


def golden_file(folder: Path, lines: list[dict]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"token_ids": one["prompt_ids"]}) + "\n" for one in lines))
    return path


def decoded(folder: Path, lines: list[dict], *argv: str) -> list[list[int]]:
    """Token ids of golden prompts, by the command."""
    source, output = golden_file(folder, lines), folder / "out.jsonl"
    ran = Run("--input", str(source), "--output", str(output), "--ignore-eos", *argv)
    code, out, err = ran.end()
    assert (code, out) == (0, "") and err.count("\n") == 1, err  # all ranks print once
    records = {one["index"]: one for one in map(json.loads, output.read_text().splitlines())}
    return [records[index]["token_ids"] for index in range(len(lines))]


def check_golden(got: list[list[int]], lines: list[dict]) -> None:
    """Free running in float32: equal up to the first step that is not sure."""
    for tokens, line in zip(got, lines, strict=True):
        unsure = [step for step, gap in enumerate(line["gaps"]) if gap <= SURE["float32"]]
        held = min(len(tokens), *unsure[:1]) if unsure else len(tokens)
        assert held > 8 and tokens[:held] == line["tokens"][:held], line["name"]


def test_two_processes_decode_golden_prompts(tmp_path):
    lines = LINES[:4]
    argv = ["--dtype", "float32", "--max-new-tokens", "32", "--budget", "8", *APART]
    check_golden(decoded(tmp_path, lines, *argv), lines)


def test_tokens_are_those_of_ranks_as_threads(tmp_path, embedded):
    """The automatic budget too: its step times are rank 0's."""
    lines = LINES[4:6]
    got = decoded(tmp_path, lines, "--max-new-tokens", "24", *APART)
    engine = Engine.load(embedded, backend="numpy", tp=2)
    wanted: list[list[int]] = [[], []]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for one in engine.generate([line["prompt_ids"] for line in lines], params, "ar"):
        wanted[one.index] += one.token_ids
    assert got == wanted


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_processes_decode_all_golden_prompts(tmp_path, world: int):
    argv = ["--dtype", "float32", "--max-new-tokens", "64", "--budget", "16"]
    env = "--ranks", "processes", "--tp", str(world)
    check_golden(decoded(tmp_path, LINES, *argv, *env), LINES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_processes_equal_autoregressive_decoding_and_hold_equal_tokens():
    env = {"DDTREE_NUMBA_CHECK_RANKS": "1"}
    argv = ["--ranks", "processes", "--tp", "8", "--check", "--json"]
    code, out, err = Run(*PROMPT, *argv, env=env).end()
    assert code == 0 and "check: 40 tokens equal" in err and out.count("\n") == 1


def launched(world: int, *argv: str) -> list[Run]:
    """The ranks of a run, as a launcher would start them."""
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        Run(*argv, env=shared | {"RANK": str(rank), "LOCAL_RANK": "0"}) for rank in range(world)
    ]


def test_a_launcher_starts_the_ranks():
    runs = launched(2, *PROMPT, "--verbose")
    (code, out, err), follower = (ran.end() for ran in runs)
    assert follower == (0, "", "")
    assert (
        code == 0 and out.startswith("\nimport unittest") and "\nranks: 2; a round: 22.0 c" in err
    )


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
    code, _, err = faulty(1, "rendezvous", "noise", env={"DDTREE_NUMBA_CHECK_RANKS": "2"}).end()
    assert code == 1
    assert err == "error: round 2: rank 1 holds other tokens or hidden states than rank 0\n"


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


def test_c07_ranks_end_with_their_parent():
    ran = Run(*PROMPT, *APART)
    assert ran.process.stdout.read(1)
    ran.process.kill()
    assert ran.end()[0] == -signal.SIGKILL


def hosts(names: list[str]) -> None:
    """Two network namespaces, joined by a cable; each its own loopback."""
    a, b = names
    for line in (
        *(f"netns add {name}" for name in names),
        f"link add {a} netns {a} type veth peer name {b} netns {b}",
        *(f"-n {name} addr add 10.93.7.{i}/24 dev {name}" for i, name in enumerate(names, 1)),
        *(f"-n {name} link set {name} up" for name in names),
    ):
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ip") is None or os.getuid() != 0, reason="needs root and ip")
def test_ranks_on_two_hosts():
    names = [f"ddt{os.getpid()}{letter}" for letter in "ab"]
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "10.93.7.1", "MASTER_PORT": "29400"}
    try:
        hosts(names)
        runs = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    sys.executable,
                    "-m",
                    "ddtree_numba.generate",
                    *PROMPT,
                ],
                cwd=ROOT,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": "0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        (out, err), other = (ran.communicate(timeout=60) for ran in runs)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    assert [ran.returncode for ran in runs] == [0, 0] and other == ("", "")
    assert out.startswith("\nimport unittest") and err.startswith("length: 40 tokens")


@pytest.mark.parametrize(
    ("env", "argv", "message"),
    [
        ({}, "--ranks processes", "--ranks has no effect without --tp"),
        ({}, "--ranks streams --tp 2", "invalid choice: 'streams'"),
        ({"RANK": "0"}, "", "RANK is set, so WORLD_SIZE must be too"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "--tp 2", "--tp 2, but WORLD_SIZE 3"),
        ({"RANK": "0"}, "--tp 2 --ranks threads", "--ranks has no effect where RANK is set"),
        ({"DDTREE_NUMBA_RANK_SECONDS": "x"}, "", "DDTREE_NUMBA_RANK_SECONDS must be a number"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(monkeypatch, capsys, env, argv, message):
    if len(env) == 2 or "--ranks" in argv and env:
        env = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"} | env
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ran = run(monkeypatch, capsys, "x", *argv.split())
    assert ran.code == 2 and message in ran.err and ran.out == ""


def test_a_number_of_ranks_that_does_not_divide_is_refused_once():
    code, out, err = Run("x", "--tp", "3", "--ranks", "processes").end()
    assert (code, out) == (2, "") and err.startswith("error: --tp 3: num_attention_heads 8 / tp 3")
    assert err.count("\n") == 1
