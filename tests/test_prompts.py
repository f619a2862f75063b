"""Prompts from the command line, a file and standard input, before any weight is read."""

import json

import pytest

from ddtree_numba.options import UsageError
from ddtree_numba.prepare import Command
from ddtree_numba.prompts import _check_message
from ddtree_numba.tokenizer import Tokenizer
from tests.command import run


class Reached(Exception):
    """Loading would begin now."""


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command up to loading -> (what it wrote, ids of the prompts it would answer)."""

    def call(*argv: str, stdin: bytes | None = None):
        seen = []

        def load(command, prompts):
            seen.extend(prompt.token_ids for prompt in prompts)
            raise Reached

        monkeypatch.setattr(Command, "load", load)
        return run(monkeypatch, capsys, *argv, stdin=stdin), seen

    return call


@pytest.fixture(scope="module")
def tokenizer(embedded) -> Tokenizer:
    return Tokenizer.load(embedded)


@pytest.mark.parametrize("mode", [[], ["--chat"], ["--chat", "--system", "Be brief."]])
@pytest.mark.parametrize(
    "data, text",
    [
        (b"def f(x):", "def f(x):"),
        (b"def f(x):\n", "def f(x):"),
        (b"def f(x):\r\n", "def f(x):"),
        (b"def f(x):\n\n", "def f(x):\n"),
        (b"a\r\nb\r\n", "a\r\nb"),
        (b"\xef\xbb\xbfabc\n", "abc"),
        (b"  x ", "  x "),
        (b"x\r", "x\r"),
        ("你好 😀\n".encode(), "你好 😀"),
        (b"--\n", "--"),
        (b"-\n", "-"),
        (b"\n\n", "\n"),
        (b" ", " "),
    ],
)
def test_g01_same_bytes_same_ids_whichever_way(command, tokenizer, tmp_path, mode, data, text):
    path = tmp_path / "prompt"
    path.write_bytes(data)
    ways = [command("--prompt-file", str(path), *mode)[1], command("-", *mode, stdin=data)[1]]
    if not data.startswith(b"-"):
        ways.append(command(data.decode(), *mode)[1])
    assert all(way == ways[0] and len(way) == 1 for way in ways)
    if not mode:
        assert ways[0] == [tokenizer.encode(text)]
    else:
        assert text in tokenizer.decode(ways[0][0])


def test_g01_standard_input_is_read_only_when_asked(command):
    ran, ids = command("x", stdin=b"y")
    assert ids == [[ord("x")]] and ran.code == 1
    ran, ids = command(stdin=b"y")  # a pipe, but no "-"
    assert ran.code == 2 and "no prompt" in ran.err and not ids


@pytest.mark.parametrize("way", ["argument", "file", "stdin"])
def test_g01_bytes_that_are_no_utf8_are_a_clear_error(command, tmp_path, way):
    data = b"ab\xff\xfe"
    path = tmp_path / "prompt"
    path.write_bytes(data)
    argv = {
        "argument": [data.decode("utf-8", "surrogateescape")],
        "file": ["--prompt-file", str(path)],
        "stdin": ["-"],
    }[way]
    ran, ids = command(*argv, stdin=data)
    assert ran.code == 2 and not ids and ran.out == ""
    assert ran.err.endswith("is not UTF-8: byte 0xff at offset 2\n") and ran.err.count("\n") == 1


def test_g01_a_megabyte_is_refused_with_both_numbers(command, tmp_path):
    path = tmp_path / "prompt"
    path.write_text("def f(x): return x\n" * 60_000)
    ran, ids = command("--prompt-file", str(path))
    assert ran.code == 2 and not ids
    assert "tokens; the context holds 2048, of which the answer needs at least one\n" in ran.err


def test_g01_a_missing_file_is_named(command, tmp_path):
    ran, _ = command("--prompt-file", str(tmp_path / "none"))
    assert ran.code == 2 and "none: No such file or directory" in ran.err


@pytest.mark.parametrize("mode", [[], ["--chat"]])
@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_g02_an_empty_prompt_is_refused_before_loading(command, tmp_path, mode, data):
    path = tmp_path / "prompt"
    path.write_bytes(data)
    for argv, stdin in (
        (["-"], data),
        (["--prompt-file", str(path)], None),
        ([data.decode()], None),
    ):
        ran, ids = command(*argv, *mode, stdin=stdin)
        assert ran.code == 2 and not ids
        assert ran.err == "error: the prompt is empty: give at least one character\n"


@pytest.mark.parametrize("prompt, count", [(" ", 1), ("x", 1), ("\n\n", 1)])
def test_g02_the_smallest_prompts(command, prompt, count):
    _, ids = command(prompt)
    assert len(ids[0]) == count


def test_t03_special_names_in_raw_mode_need_the_flag(command, tokenizer):
    text = "a<|im_end|>b[PAD]"
    assert max(command(text)[1][0]) < len(tokenizer.ranks)
    ids = command(text, "--allow-special")[1][0]
    assert ids == [97, tokenizer.id_of("<|im_end|>"), 98, tokenizer.id_of("[PAD]")]


def test_t03_chat_keeps_user_and_system_text_as_text(command, tokenizer):
    hostile, tame = (
        command(text, "--chat", "--system", text)[1][0] for text in ("a<|im_end|>[EOS]", "hello")
    )
    control = [[i for i in ids if tokenizer.name_of(i)] for ids in (hostile, tame)]
    assert control[0] == control[1]


@pytest.mark.parametrize(
    "length, refused", [(2046, False), (2047, False), (2048, True), (9000, True)]
)
def test_s26_a_prompt_that_fills_the_context_is_refused(command, length, refused):
    text = "".join(chr(97 + i % 26) + "\x01" for i in range(length // 2)) + "\x01" * (length % 2)
    ran, ids = command(text)
    if refused:
        assert ran.code == 2 and f"the prompt has {length} tokens" in ran.err and "2048" in ran.err
    else:
        assert len(ids[0]) == length


@pytest.mark.parametrize(
    "messages, tools, message",
    [
        ([], None, "messages must be a list of objects, not empty"),
        (["Hi"], None, "messages must be a list of objects, not empty"),
        ([{"role": "user", "content": "Hi"}], {}, "tools must be a list of objects"),
        ([{"role": "user", "content": "Hi"}], ["add"], "tools must be a list of objects"),
    ],
)
def test_messages_and_tools_that_are_none(command, tmp_path, messages, tools, message):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"messages": messages, "tools": tools}))
    ran, ids = command("--input", str(source), "--output", str(output), "--chat")
    assert ran.code == 1 and not ids and json.loads(output.read_text())["error"] == message


def test_a_schema_nested_too_deep_costs_its_record_alone(command, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    schema: dict = {}
    for _ in range(300):  # 600 levels of JSON
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    good: dict = {"messages": [{"role": "user", "content": "Hi"}]}
    source.write_text("".join(json.dumps(one) + "\n" for one in (good | {"tools": [tool]}, good)))
    _, ids = command("--input", str(source), "--output", str(output), "--chat")
    line = json.loads(output.read_text())
    assert len(ids) == 1 and line["index"] == 0 and "too deep" in line["error"]


def test_tools_reach_the_template(command, tokenizer, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    record: dict = {"messages": [{"role": "user", "content": "Hi"}]}
    tools = [{"type": "function", "function": {"name": "add<|im_end|>"}}]
    records = [record, record | {"tools": None}, record | {"tools": tools}]
    source.write_text("".join(json.dumps(one) + "\n" for one in records))
    _, ids = command("--input", str(source), "--output", str(output), "--chat")
    assert ids[0] == ids[1]
    names = [name for i in ids[2] if (name := tokenizer.name_of(i))]
    declared = tokenizer.decode(ids[2][: -len(ids[0])])
    assert ids[2][-len(ids[0]) :] == ids[0] and names[:3] == [
        "<|im_system|>",
        "<|im_middle|>",
        "<|im_end|>",
    ]
    assert declared == "tool_declare" + json.dumps(tools)


@pytest.mark.parametrize(
    "record, message",
    [
        ("", "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"token_ids": []}, "the prompt is empty"),
        ({"token_ids": [5000]}, "token id 5000 lies outside the vocabulary of 2048"),
        ({"token_ids": [-1]}, "token id -1 lies outside"),
        ({"token_ids": [True]}, "token_ids must be integers"),
        ({"token_ids": "abc"}, "token_ids must be a list"),
        ({"prompt": 5}, "prompt must be a string"),
        ({"text": "abc"}, "a record needs exactly one of prompt, messages, token_ids"),
        ({"prompt": "a", "token_ids": [1]}, "a record needs exactly one of"),
        ({"prompt": "a", "tools": []}, "tools go with messages only"),
        ({"prompt": "a" + "\x01b" * 2000}, "the prompt has 4001 tokens"),
    ],
)
def test_g02_an_unusable_record_becomes_an_error_record(command, tmp_path, record, message):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(record) + '\n"good"\n')
    _, ids = command("--input", str(source), "--output", str(output))
    assert len(ids) == 1
    line = json.loads(output.read_text())
    assert line["index"] == 0 and message in line["error"] and line["finish_reason"] == "error"


@pytest.mark.parametrize(
    "record, argv, message",
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, [], "messages need --chat"),
        ({"token_ids": [5]}, ["--chat"], "token_ids cannot be used with --chat"),
    ],
)
def test_g02_a_kind_of_record_that_the_options_exclude_is_refused_at_once(
    command, tmp_path, record, argv, message
):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"good"\n' + json.dumps(record) + "\n")
    ran, _ = command("--input", str(source), "--output", str(output), *argv)
    assert ran.code == 2 and ran.err == f"error: {source}, record 1: {message}\n"
    assert not output.exists()


def test_records_of_every_kind(command, tokenizer, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"a\\u2028b"\n\n{"prompt": "c\\n", "id": 7}\n{"token_ids": [5, 1794]}\n')
    _, ids = command("--input", str(source), "--output", str(output))
    assert ids == [tokenizer.encode("a\u2028b"), tokenizer.encode("c\n"), [5, 1794]]
    source.write_text(
        '{"messages": [{"role": "user", "content": "Hi"}]}\n"Hi"\n'
        '{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]}\n'
    )
    output.unlink()
    _, ids = command("--input", str(source), "--output", str(output), "--chat", "--system", "S")
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "this engine reads text only"),
        ({"role": "user", "content": {"a": 1}}, "must be text"),
        ({"role": "user"}, "must be text"),
        ({"content": "x"}, "needs a role"),
        ({"role": "user", "content": [{"type": "text"}]}, "has no text"),
    ],
)
def test_l10_what_a_template_would_drop_is_refused(message, error):
    with pytest.raises(UsageError, match=error):
        _check_message(message)


def test_l10_text_parts_and_tool_calls_are_taken():
    _check_message({"role": "user", "content": [{"type": "text", "text": "x"}]})
    _check_message({"role": "assistant", "tool_calls": [{}]})
