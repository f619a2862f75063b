"""--input and --output: a line a record, taken up again after an interruption."""

import json
import math
import os
import signal

import numpy as np
import pytest

from ddtree_numba.jsonl import Output, dumps, read_records
from ddtree_numba.options import UsageError
from tests.command import refuse_constant, run, scripted_command

END = 258
PROMPTS = ["first", "second é", {"prompt": "third", "task": "ignored"}]


@pytest.fixture
def files(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in PROMPTS), "utf-8")
    return source, tmp_path / "out.jsonl"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, files):
    """Answer the records of `files` with a scripted model."""

    def call(answer, *argv: str):
        folder = scripted_command(monkeypatch, tmp_path, list(answer))
        model = ["--model", str(folder), "--mode", "ar"]
        return run(
            monkeypatch, capsys, "--input", str(files[0]), "--output", str(files[1]), *model, *argv
        )

    return call


def lines(path) -> list[dict]:
    text = path.read_text("utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def test_g04_one_line_a_record(command, files):
    ran = command([*"né".encode(), END])
    assert ran.code == 0 and ran.out == ""
    assert "3 of 3 prompts answered: 12 tokens in" in ran.err
    records = sorted(lines(files[1]), key=lambda one: one["index"])
    assert [one["index"] for one in records] == [0, 1, 2]
    for one in records:
        assert one["text"] == "né" and one["finish_reason"] == "stop" and "error" not in one
        assert one["token_ids"] == [*"né".encode(), END] and one["completion_tokens"] == 4
        assert one["prefill_seconds"] >= 0 and one["decode_seconds"] > 0
    assert [one["prompt_tokens"] for one in records] == [5, 9, 5]
    assert "né" in files[1].read_text("utf-8")


@pytest.mark.parametrize("torn", ["", '{"index": 1, "tex', '{"index": 1, "text": "é'])
def test_g04_a_second_run_does_only_what_is_missing(command, files, torn):
    command([*b"old", END])
    kept = [line for line in files[1].read_text().splitlines() if json.loads(line)["index"] != 1]
    files[1].write_bytes("".join(line + "\n" for line in kept).encode() + torn.encode()[:-1])
    ran = command([*b"new", END])
    assert (
        ran.code == 0 and "holds 2 of 3 results" in ran.err and "1 of 1 prompt answered" in ran.err
    )
    assert {one["index"]: one["text"] for one in lines(files[1])} == {0: "old", 1: "new", 2: "old"}
    before = files[1].read_bytes()
    assert command([*b"other", END]).code == 0
    assert files[1].read_bytes() == before


def test_g04_what_was_done_before_a_crash_is_kept(command, files):
    calls = iter(range(10**6))

    def crash() -> int:
        if next(calls) == 1:
            raise RuntimeError("the machine\nis gone")
        return ord("x")

    ran = command([crash, END])
    assert ran.code == 1 and ran.err.endswith("error: RuntimeError: the machine is gone\n")
    done = len(lines(files[1]))
    ran = command([ord("x"), END])
    assert ran.code == 0 and len(lines(files[1])) == 3 > done
    assert sorted(one["index"] for one in lines(files[1])) == [0, 1, 2]


def test_g04_a_record_that_fails_does_not_stop_the_others(command, files):
    files[0].write_text('"first"\n' + json.dumps("long " * 2000) + '\n"third"\n')
    ran = command([*b"ok", END])
    assert ran.code == 1
    records = {one["index"]: one for one in lines(files[1])}
    assert sorted(records) == [0, 1, 2] and records[0]["text"] == records[2]["text"] == "ok"
    assert records[1]["finish_reason"] == "error" and "context holds 2048" in records[1]["error"]
    assert "2 of 3 prompts answered: 6 tokens in" in ran.err
    assert ran.err.splitlines()[-1] == f"error: record 1: {records[1]['error']}"
    again = command([END])
    assert again.code == 1  # nothing left to do, but not all is well
    assert again.err.splitlines() == [
        f"{files[1]} holds 3 of 3 results, 1 failed: to try a record again, delete its line",
        ran.err.splitlines()[-1],
    ]


def test_g04_a_numerical_error_is_its_record_s_alone(command, files):
    ran = command([ord("a"), np.full(512, np.nan)])
    assert ran.code == 1 and "0 of 3 prompts answered: 3 tokens in" in ran.err
    for one in lines(files[1]):
        assert one["text"] == "a" and "non-finite" in one["error"] and one["rounds"] == 2


def test_answers_that_fill_the_context_are_counted(command, files):
    files[0].write_text('"first"\n' + json.dumps("x" * 2046) + "\n")
    ran = command(b"ab", "--max-new-tokens", "3")
    assert ran.code == 0 and "\n1 answer filled the context of 2048 tokens\n" in ran.err
    found = {one["index"]: (one["finish_reason"], one["text"]) for one in lines(files[1])}
    assert found == {0: ("length", "aba"), 1: ("length", "ab")}


def test_c07_interrupted_records_are_not_written(command, files):
    calls = iter(range(10**6))

    def interrupt() -> int:
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return ord("b")

    ran = command([ord("a"), interrupt, ord("c"), END])
    assert ran.code == 130 and "0 of 3 prompts answered" in ran.err
    assert lines(files[1]) == []
    assert command([ord("a"), END]).code == 0 and len(lines(files[1])) == 3


def test_check_compares_every_answer(command, files):
    ran = command([*b"abc", END], "--mode", "chain", "--check")
    assert ran.code == 0 and "check: 12 tokens equal" in ran.err
    files[1].unlink()
    calls = iter(range(10**6))

    def unsteady() -> int:
        return ord("x") if next(calls) == 0 else ord("b")

    ran = command([ord("a"), unsteady, END], "--mode", "chain", "--check")
    assert ran.code == 1 and ran.err.splitlines()[-1].startswith("check failed: prompt 0, token 1:")


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"index": 0}\nnot json\n', "line 2: not a result"),
        ('{"text": "x"}\n', "line 1: not a result"),
        ("[1]\n", "line 1: not a result"),
        ('{"index": [0]}\n', "line 1: not a result"),
        ('{"index": 0}\n{"index": 0}\n', "line 2: index 0 is there twice"),
        ('{"index": 3}\n', "holds index 3, the input ends at 2"),
        ('{"index": 0, "prompt_tokens": 99}\n', "prompt 0 had 99 tokens, now 5"),
    ],
)
def test_g04_another_output_is_refused_unchanged(command, files, content, message):
    files[1].write_text(content)
    ran = command([END])
    assert ran.code == 2 and message in ran.err and ran.err.count("\n") == 1
    assert files[1].read_text() == content


@pytest.mark.parametrize(
    "content, message",
    [
        (b'"a"\nplain text\n', "line 2: not JSON"),
        (b'"a"\n5\n', "line 2: neither a string nor an object"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"\n\n", "no records"),
        (b'"\xff"\n', "is not UTF-8"),
        (None, "No such file"),
    ],
)
def test_g04_a_broken_input_is_refused_before_loading(command, files, content, message):
    files[0].unlink() if content is None else files[0].write_bytes(content)
    ran = command([END])
    assert ran.code == 2 and message in ran.err and not files[1].exists()


def test_g04_input_and_output_must_differ(command, files):
    os.link(files[0], files[1])
    ran = command([END])
    assert ran.code == 2 and "another file than --input" in ran.err
    assert read_records(str(files[0])) == PROMPTS


def test_an_output_that_is_no_file_is_refused(command, files):
    os.mkfifo(files[1])
    ran = command([END])
    assert ran.code == 2 and "not a file" in ran.err and ran.err.count("\n") == 1


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UsageError, match="none/out: No such file"):
        Output(str(tmp_path / "none" / "out"), str(tmp_path / "in"))
    (tmp_path / "in").touch()
    with pytest.raises(UsageError, match="Is a directory"):
        Output(str(tmp_path), str(tmp_path / "in"))


def test_an_output_on_a_full_disk_is_named(command, files, monkeypatch):
    def full(output: Output, record: dict) -> None:
        output._file.close()
        output._file = open("/dev/full", "a")  # noqa: SIM115
        write(output, record)

    write = Output.write
    monkeypatch.setattr(Output, "write", full)
    ran = command(b"ab")
    assert ran.code == 1 and ran.err.endswith(f"error: {files[1]}: No space left on device\n")


def test_g04_json_never_holds_nan():
    record = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": 1.5, "e": "é"}
    assert dumps(record) == '{"a": null, "b": [null, {"c": null}], "d": 1.5, "e": "é"}'


def test_a_last_line_that_is_no_result_is_left_alone(tmp_path):
    """Only what a torn write can have left is cut off: notes without a line ending are not."""
    source, path = tmp_path / "in.jsonl", tmp_path / "notes"
    source.write_text('"x"\n')
    path.write_text("my notes, no newline")
    with pytest.raises(UsageError, match="its last line is no result of this command"):
        Output(str(path), str(source))
    assert path.read_text() == "my notes, no newline"
    for torn in ("{", '{"index": 1, "te'):
        path.write_text(torn)
        Output(str(path), str(source)).close()
        assert path.read_text() == ""
