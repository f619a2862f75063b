"""Signals, pipes and a slow start, on the embedded model in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.command import ROOT

LONG = ["--ignore-eos", "--max-new-tokens", "1900"]
# The command, with a pause where weights are read; PAUSE says for how long and that it has begun.
SLOW_LOAD = """
import sys, time
from ddtree_numba import load
from ddtree_numba.generate import main
read = load.load_target
def load_target(*args, **named):
    print("reading", file=sys.stderr, flush=True)
    time.sleep(30)
    return read(*args, **named)
load.load_target = load_target
sys.exit(main(sys.argv[1:]))
"""


def start(*argv: str, code: str | None = None, **named) -> subprocess.Popen:
    runner = ["-m", "ddtree_numba.generate"] if code is None else ["-c", code]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | named
    return subprocess.Popen([sys.executable, *runner, *argv], cwd=ROOT, **streams)


def finish(process: subprocess.Popen, seconds: float = 30) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, (out or b"").decode(), err.decode()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_c07_a_signal_while_decoding_prints_what_was_made(number, code):
    process = start("def f(", *LONG)
    first = process.stdout.read(1)
    process.send_signal(number)
    returncode, out, err = finish(process)
    assert returncode == code and first
    assert err.startswith("cancelled: ") and "tokens per round" in err and "Traceback" not in err


def test_c07_json_of_an_interrupted_answer():
    process = start("def f(", "--json", "--show-tree", *LONG)
    while not process.stderr.readline().startswith(b"round 2"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    returncode, out, _ = finish(process)
    one = json.loads(out)
    assert returncode == 130 and one["finish_reason"] == "cancelled"
    assert one["completion_tokens"] == len(one["token_ids"]) > 1


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_c07_a_signal_while_loading_ends_at_once(number, code):
    process = start("def f(", code=SLOW_LOAD)
    assert process.stderr.readline() == b"reading\n"
    process.send_signal(number)
    returncode, out, err = finish(process)
    assert (returncode, out) == (code, "")
    assert err == "interrupted before anything was decoded\n"


def test_c07_a_second_signal_ends_at_once():
    code = """
import os, signal, sys, time
from ddtree_numba.interrupts import Interrupts
with Interrupts() as interrupts:
    interrupts.gentle = True
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.cancel.is_set()
    print("still here", flush=True)
    time.sleep(30)  # a round that does not end
"""
    process = start(code=code)
    assert process.stdout.readline() == b"still here\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "")


def test_c07_handlers_are_given_back_and_left_alone_in_threads():
    import threading

    from ddtree_numba.interrupts import Interrupts

    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    entered = []

    def elsewhere() -> None:
        with Interrupts() as interrupts:
            entered.append(interrupts)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert entered and signal.getsignal(signal.SIGINT) is before


def test_g03_a_closed_pipe_ends_quietly():
    process = start("def f(", *LONG)
    assert process.stdout.read(1)
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 141 and err == b""


@pytest.mark.parametrize("argv", [["--version"], ["--plan"]])
def test_g03_a_pipe_closed_before_short_output_ends_quietly(argv):
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*argv, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 141 and err == b""


def test_g03_streams_go_where_they_are_sent(tmp_path):
    with open(tmp_path / "out.txt", "wb") as out, open(tmp_path / "err.txt", "wb") as err:
        process = start("def f(", "--max-new-tokens", "6", "--ignore-eos", stdout=out, stderr=err)
        process.wait(timeout=30)
    answer, notes = ((tmp_path / name).read_text() for name in ("out.txt", "err.txt"))
    assert process.returncode == 0 and answer
    assert notes.startswith("length: 6 tokens in ") and notes.count("\n") == 1


def test_g03_output_is_utf8_whatever_the_locale():
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    argv = ["--chat", "--show-tree", "é", "--max-new-tokens", "3", "--ignore-eos"]
    returncode, out, err = finish(start(*argv, env=env))
    assert returncode == 0 and err.isascii() and "`- + " in err


def test_g03_trees_and_answer_in_one_file_do_not_mix():
    argv = ["def f(", "--show-tree", "--max-new-tokens", "6", "--ignore-eos"]
    process = start(*argv, stderr=subprocess.STDOUT)
    text = process.communicate(timeout=30)[0].decode()
    assert text.startswith("round 1: ") and "\nlength: 6 tokens in " in text
    assert all(
        line.startswith("round ") for line in text.splitlines() if " accepted + bonus = " in line
    )


def test_a_full_disk_under_standard_output_is_one_line():
    with open("/dev/full", "wb") as full:
        process = start("--plan", stdout=full)
        err = process.communicate(timeout=30)[1].decode()
    assert (process.returncode, err) == (1, "error: standard output: No space left on device\n")


@pytest.mark.parametrize(
    "argv, code, out, err",
    [
        ("- <&-", 2, "", "error: the prompt is empty: give at least one character\n"),
        ("--plan >&-", 0, "", ""),
        ("--version >&- 2>&-", 0, "", ""),
        ("x --budget 999 2>&-", 2, "", ""),
    ],
)
def test_a_closed_stream_is_empty_and_leads_nowhere(argv, code, out, err):
    shell = f'exec "$0" -m ddtree_numba.generate {argv}'
    ran = subprocess.run(
        ["sh", "-c", shell, sys.executable], capture_output=True, text=True, cwd=ROOT
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, out, err)


def test_g06_first_and_second_run_report_times_within_the_wall_clock():
    for _ in range(2):
        begin = time.perf_counter()
        code, _, err = finish(start("def f(", "--max-new-tokens", "8"))
        wall = time.perf_counter() - begin
        parts = [float(err.split(f"{name} ")[1].split(" s")[0]) for name in ("load", "decode")]
        parts.append(float(err.split("prefill ")[1].split(" s")[0]))
        assert code == 0 and 0 < sum(parts) <= wall
