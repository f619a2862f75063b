"""The command around a scripted model: what goes to which stream, and how an answer ends."""

import json
import os
import signal

import numpy as np
import pytest

from tests.command import run, scripted_command

END, PAD, CLOSE = 258, 511, 279  # of the toy vocabulary: 256 bytes before
FIELDS = [
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "rounds",
    "tokens_per_round",
    "tokens_per_second",
    "mode",
    "budget",
    "backend",
    "seed",
]
MODES = (["--mode", "ar"], ["--mode", "chain"], ["--budget", "16"], ["--budget", "1"])


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run the command on a model that gives `answer`."""

    def call(answer, *argv: str, prompt: str = "xyz", words: tuple[str, ...] = ()):
        folder = scripted_command(monkeypatch, tmp_path, list(answer), words=words)
        return run(monkeypatch, capsys, prompt, "--model", str(folder), *argv)

    return call


@pytest.mark.parametrize("mode", MODES)
def test_g03_the_answer_alone_goes_to_standard_output(command, mode):
    ran = command([*b"hello\n", END, *b"never"], *mode)
    assert (ran.code, ran.out) == (0, "hello\n")
    assert ran.err.startswith("stop: 7 tokens in ") and ran.err.count("\n") == 1
    assert "tokens per round (emitted, bonus token included)" in ran.err


def test_g03_quiet_silences_all_but_errors(command):
    ran = command([*b"hi", END], "--quiet")
    assert ran == (0, "hi", "")
    ran = command([ord("h"), np.full(512, np.nan)], "--quiet")
    assert ran.code == 1 and ran.out == "h" and ran.err.count("\n") == 1
    assert ran.err.startswith("error: non-finite logits")


@pytest.mark.parametrize(
    "answer, argv, reason, text, count",
    [
        ([*b"ab", END, *b"c"], [], "stop", "ab", 3),
        ([*b"ab", 265, *b"c"], [], "stop", "ab", 3),
        (b"abScd", ["--stop", "x", "--stop", "S"], "stop", "ab", 3),
        (b"abScd", ["--stop", "S", "--max-new-tokens", "2"], "length", "ab", 2),
        (b"abcdefghij", ["--max-new-tokens", "9"], "length", "abcdefghi", 9),
        ([*b"a", END, *b"b"], ["--ignore-eos", "--max-new-tokens", "7"], "length", "ababa", 7),
    ],
)
def test_s03_how_an_answer_ends(command, answer, argv, reason, text, count):
    answer = list(answer)
    one = command(answer, "--json", "--budget", "16", *argv).json
    assert (one["finish_reason"], one["text"]) == (reason, text)
    assert one["token_ids"] == (answer * 3)[:count] and one["completion_tokens"] == count
    assert one["rounds"] * one["tokens_per_round"] == count
    assert command(answer, *argv).out == text


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_g06_rates_are_null_where_undefined(command, limit):
    one = command(b"abc", "--json", "--max-new-tokens", str(limit)).json
    assert (one["tokens_per_second"] is None) == (limit < 2)
    assert (one["tokens_per_round"] is None) == (limit == 0)
    ran = command(b"abc", "--max-new-tokens", str(limit))
    assert ran.code == 0 and ("; - tokens/s;" in ran.err) == (limit < 2)
    for part in ("load", "prefill", "decode"):
        assert f"{part} 0." in ran.err


def test_json_has_the_documented_fields(command):
    one = command([*"é😀".encode(), END], "--json", "--budget", "4").json
    assert list(one) == FIELDS
    assert one["text"] == "é😀" and one["prompt_tokens"] == 3
    assert (one["mode"], one["budget"], one["backend"]) == ("ddtree", 4, "numpy")


def test_g04_an_answer_that_failed_says_so_in_json(command):
    ran = command([ord("h"), np.full(512, np.nan)], "--json")
    one = json.loads(ran.out)
    assert ran.code == 1 and list(one) == [*FIELDS, "error"]
    assert one["finish_reason"] == "error" and one["text"] == "h"
    assert ran.err.splitlines()[-1] == f"error: {one['error']}"


@pytest.mark.parametrize("mode", MODES)
def test_t04_characters_accepted_in_parts_or_cut_by_the_limit(command, mode):
    answer = [*"你😀".encode(), *b"\xf0\x9fA", *b"\x80", *"😀".encode()[:2]]
    ran = command(answer, "--max-new-tokens", str(len(answer)), *mode)
    assert ran.out == "你😀\ufffdA\ufffd\ufffd"


def test_t03_pad_is_never_printed(command):
    assert command([*b"a", PAD, *b"b", END]).out == "ab"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "answer, reasoning, text",
    [
        ([*b"x", CLOSE, *b"y", END], "x", "y"),
        ([*b"x</think>y", END], "x", "y"),
        ([CLOSE, *b"y", END, *b"z"], "", "y"),
        ([*b"xxx"], "xxxxxx", ""),
        ([*b"xx</th"], "xx</th", ""),
        ([*b"x", 267, *b"call", END], "x", "<|tool_calls_section_begin|>call"),
    ],
)
def test_t06_reasoning_is_kept_apart(command, mode, answer, reasoning, text):
    argv = ["--chat", "--thinking", *mode]
    limit = [] if END in answer else ["--max-new-tokens", "6"]
    one = command(answer, "--json", *argv, *limit).json
    assert (one["reasoning"], one["text"]) == (reasoning, text)
    ran = command(answer, *argv, *limit)
    assert ran.out == text and ran.err.startswith(f"{reasoning}\n" if reasoning else "stop")


def test_t06_no_thinking_and_raw(command):
    answer = [*b"x", CLOSE, *b"y", END]
    for switch in ([], ["--no-thinking"]):
        assert command(answer, "--chat", *switch).out == "x</think>y"
        assert "reasoning" not in command(answer, "--chat", "--json", *switch).json
    ran = command(answer, "--chat", "--thinking", "--raw")
    assert ran.out == "x</think>y" and not ran.err.startswith("x")


def test_show_tree_draws_every_round(command):
    ran = command([*b"abcdefghij", END], "--show-tree", "--mode", "chain")
    assert ran.out == "abcdefghij"
    headings = [line for line in ran.err.splitlines() if line.startswith("round ")]
    assert headings == [
        "round 1: 8 nodes, 7 drafted tokens accepted + bonus = 8 tokens",
        "round 2: 8 nodes, 7 drafted tokens accepted + bonus = 8 tokens, 3 emitted before the end",
    ]
    assert '* "b"' in ran.err and '+ "h"' in ran.err


def test_check_passes_and_tells_the_gain(command):
    ran = command([*b"abcdef", END], "--check", "--budget", "8")
    assert ran.code == 0 and ran.out == "abcdef"
    assert ran.err.splitlines()[-1].startswith("check: 7 tokens equal to autoregressive decoding")


@pytest.mark.parametrize("changed, complaint", [(98, "98, but 120"), (END, "258, but 120")])
def test_check_fails_on_the_first_difference(command, changed, complaint):
    calls = iter(range(10**6))

    def unsteady() -> int:
        return changed if next(calls) == 0 else ord("x")

    ran = command([*b"a", unsteady, *b"c", END], "--check", "--mode", "chain")
    assert ran.code == 1
    assert ran.err.splitlines()[-1] == (
        f"check failed: prompt 0, token 1: {complaint} in autoregressive decoding"
    )


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("json_output", [False, True])
def test_c07_a_signal_ends_after_the_round(command, number, code, json_output):
    sent = []

    def interrupt() -> int:
        if not sent:
            sent.append(os.kill(os.getpid(), number))
        return ord("c")

    before = signal.getsignal(number)
    argv = ["--mode", "ar"] + (["--json"] if json_output else [])
    ran = command([*b"ab", interrupt, *b"def"], *argv)
    assert ran.code == code and ran.err.startswith("cancelled: 3 tokens in 3 rounds")
    assert json.loads(ran.out)["text"] == "abc" if json_output else ran.out == "abc"
    assert signal.getsignal(number) is before


def test_s19_a_top_k_above_the_vocabulary_is_off_with_a_note(command):
    for k, noted in ((1, False), (512, False), (513, True), (9999999, True)):
        ran = command([*b"ab", END], "--temperature", "0.01", "--top-k", str(k))
        assert ran.out == "ab" and ("above the vocabulary of 512: off" in ran.err) is noted


def test_an_answer_that_fills_the_context_says_so(command):
    endings = {2044: "length: 3", 2046: "length (the context of 2048 tokens is full): 2"}
    for length, ending in endings.items():
        ran = command(b"abc", "--max-new-tokens", "3", prompt="x" * length)
        assert ran.code == 0 and ran.err.startswith(f"{ending} tokens in ")
    one = command(b"abc", "--json", "--max-new-tokens", "3", prompt="x" * 2046).json
    assert (one["finish_reason"], one["completion_tokens"]) == ("length", 2)


def test_verbose_names_the_stop_tokens(command):
    ran = command([*b"ab", END], "--verbose")
    assert "stop tokens: [EOS] 257, <|im_end|> 258, [EOT] 265" in ran.err


def test_a_drafter_that_drafts_nothing_is_named(command, tmp_path, monkeypatch, capsys):
    command([END])
    folder = next(tmp_path.iterdir())
    path = folder / "drafter" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"block_size": 1}))
    for argv in ([], ["--drafter", str(path.parent)], ["--mode", "chain"]):
        ran = run(monkeypatch, capsys, "x", "--model", str(folder), *argv)
        assert ran.code == 0 and ran.err.startswith(f"note: {path}: block_size is 1: this ")
    assert "note" not in run(monkeypatch, capsys, "x", "--model", str(folder), "--mode", "ar").err


def test_a_model_without_drafter_is_refused_before_loading(command, tmp_path, monkeypatch, capsys):
    command([END])
    folder = next(tmp_path.iterdir())
    (folder / "drafter" / "config.json").unlink()
    ran = run(monkeypatch, capsys, "x", "--model", str(folder))
    assert ran.code == 2 and "holds no drafter: give --drafter DIR, or --mode ar" in ran.err
    assert run(monkeypatch, capsys, "x", "--model", str(folder), "--mode", "ar").code == 0
