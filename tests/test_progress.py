"""One bar on a terminal, a line every few seconds elsewhere, nothing with --quiet."""

import io

import pytest

from ddtree_numba import progress
from ddtree_numba.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_g08_a_line_every_few_seconds(clock):
    stream = io.StringIO()
    with Progress("loading", "B", stream) as report:
        for second in range(13):
            clock[0] = second
            report(second * 10**9, 20 * 10**9)
    assert stream.getvalue().splitlines() == [
        "loading: 25 % of 20.0 GB, 1.00 GB/s, 15 s left",
        "loading: 50 % of 20.0 GB, 1.00 GB/s, 10 s left",
    ]


def test_g08_prompts_are_counted(clock):
    stream = io.StringIO()
    report = Progress("prompts", "prompts", stream)
    clock[0] = 9
    report(1, 3)
    assert stream.getvalue() == "prompts: 33 %, 1 of 3 prompts\n"


def test_g08_what_is_quick_or_quiet_prints_nothing(clock):
    for quiet in (False, True):
        stream = io.StringIO()
        with Progress("loading", "B", stream, quiet) as report:
            clock[0] += 99 if quiet else 1
            report(1, 2)
        assert stream.getvalue() == ""
    terminal = Terminal()
    with Progress("loading", "B", terminal, quiet=True) as report:
        report(1, 2)
    assert terminal.getvalue() == ""


def test_g08_one_bar_in_bytes_on_a_terminal():
    terminal = Terminal()
    with Progress("loading", "B", terminal) as report:
        for done in range(0, 10_001, 100):
            report(done, 10_000)
    text = terminal.getvalue()
    assert "\n" not in text and "loading:" in text and "10.0k" in text
    assert "B/s" in text and "<" in text  # the rate, and the time left
    assert text.endswith("\r")  # taken away: the answer begins on a clean line


def test_nothing_to_do_is_no_division_by_zero(clock):
    stream = io.StringIO()
    report = Progress("loading", "B", stream)
    clock[0] = 9
    report(0, 0)
    assert "100 %" in stream.getvalue()


def test_g08_the_command_reports_loading_in_bytes(monkeypatch, capsys, embedded):
    from tests.command import run

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    ran = run(monkeypatch, capsys, "x", "--max-new-tokens", "1", "--mode", "ar")
    lines = [line for line in ran.err.splitlines() if line.startswith("loading: ")]
    percents = [int(line.split()[1]) for line in lines]
    assert percents == sorted(percents) and percents[-1] == 100 and len(percents) > 5
    ran = run(monkeypatch, capsys, "x", "--max-new-tokens", "1", "--mode", "ar", "--quiet")
    assert ran.err == ""
