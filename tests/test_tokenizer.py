"""Text to ids and back; control tokens; stop ids; broken files."""

import json
from itertools import groupby

import pytest

from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.tokenizer import MAX_RUN, MAX_TEXT, Tokenizer, slices
from tests.toys import NAMES, toy_folder, write_ranks

TEXTS = [
    "def f(x):\n    return x's, don't, 12345\r\n\r\n",
    "你好，世界 mixed 漢字kana かな",
    "emoji 👩‍👩‍👧 flags 🇫🇷 and \u0301combining",
    " \t\n\n  trailing  ",
    "\x00\x07\ufeff\u2028",
    "",
]


@pytest.mark.parametrize("eos", [257, [257], [257, 258], None])
def test_t01_stop_ids_are_configured_ids_and_turn_ends_by_name(tmp_path, eos):
    tokenizer = Tokenizer.load(toy_folder(tmp_path, eos=eos))
    assert tokenizer.stop_ids == {257, 258, 265}
    assert [tokenizer.name_of(i) for i in (257, 258, 265)] == ["[EOS]", "<|im_end|>", "[EOT]"]


def test_t01_a_configured_id_without_a_name_of_ours_counts_too(tmp_path):
    folder = toy_folder(tmp_path, eos=300)
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": 301, "text_config": {"eos_token_id": [302]}})
    )
    assert Tokenizer.load(folder).stop_ids == {257, 258, 265, 300, 301, 302}


def test_t01_renumbered_control_tokens_are_found_by_name(tmp_path):
    names = {7: "<|im_end|>", 2: "[EOS]", 100: "[PAD]"}
    tokenizer = Tokenizer.load(toy_folder(tmp_path, words=("ab", "cd"), names=names))
    assert tokenizer.id_of("<|im_end|>") == 265
    assert tokenizer.stop_ids == {260, 265}
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [265]
    with pytest.raises(CheckpointError, match="no control token <|im_user|>"):
        tokenizer.id_of("<|im_user|>")


def test_t01_stop_tokens_give_no_text_whatever_the_file_says(tmp_path):
    path = toy_folder(tmp_path) / "tokenizer_config.json"
    path.write_text(path.read_text().replace("true", "false"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode([97, *tokenizer.stop_ids, 98]) == "ab"


@pytest.mark.parametrize("eos", [1, 512, -1, "</s>"])
def test_t01_an_eos_that_is_no_control_token_is_refused(tmp_path, eos):
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: eos_token_id .*256 .. 511"
    ):
        Tokenizer.load(toy_folder(tmp_path, eos=eos))


def test_t03_names_in_text_are_text_unless_allowed(tmp_path):
    tokenizer = Tokenizer.load(toy_folder(tmp_path))
    text = "a<|im_end|>b[PAD][EOS]</think><|reserved_token_300|>"
    assert max(tokenizer.encode(text)) < 256
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, allow_special=True) == [97, 258, 98, 511, 257, 279, 300]


def test_t03_hidden_control_tokens_give_no_text(tmp_path):
    tokenizer = Tokenizer.load(toy_folder(tmp_path))
    ids = [97, 511, 258, 279, 267, 98]
    assert tokenizer.decode(ids) == "a</think><|tool_calls_section_begin|>b"
    assert tokenizer.decode_bytes(ids).startswith(b"a[PAD]<|im_end|></think>")


@pytest.mark.parametrize("text", TEXTS)
def test_ids_give_back_the_text(embedded, text):
    tokenizer = Tokenizer.load(embedded)
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert all(token_id < len(tokenizer.ranks) for token_id in ids)


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("ab12345", ["ab", "123", "45"]),
        ("it's IT'S", ["it's", " IT'S"]),
        ("helloWorld", ["hello", "World"]),
        ("你好ab", ["你好", "ab"]),
        ("a!!\n\nb", ["a", "!!\n\n", "b"]),
        ("a   b", ["a", "  ", " b"]),
        ("a \r\n b", ["a", " \r\n", " b"]),
    ],
)
def test_text_is_cut_as_published(tmp_path, text, pieces):
    words = tuple(dict.fromkeys(piece for piece in pieces if len(piece.encode()) > 1))
    tokenizer = Tokenizer.load(toy_folder(tmp_path, words=words))
    # A piece that is a word becomes that word's id; other cuts would leave single bytes.
    assert tokenizer.encode(text) == [tokenizer.ranks[piece.encode()] for piece in pieces]


@pytest.mark.parametrize("size", [0, 1, MAX_RUN, MAX_RUN + 1, 3 * MAX_RUN, MAX_TEXT + 7])
def test_long_texts_are_cut_where_the_published_tokenizer_cuts(size):
    text = ("x" * size) + " " * (MAX_RUN + 5) + "ab cd\n" * 40
    text += text[: MAX_TEXT // 2]
    assert list(filter(None, slices(text))) == list(filter(None, one_by_one(text)))


def one_by_one(text: str):
    """The published rule, character by character."""
    for first in range(0, len(text), MAX_TEXT):
        part, piece = text[first : first + MAX_TEXT], ""
        for _, group in groupby(part, str.isspace):
            run = 0
            for character in group:
                run += 1
                if run > MAX_RUN:
                    yield piece
                    piece, run = "", 1
                piece += character
        yield piece


def test_a_megabyte_without_a_space_is_encoded(embedded):
    tokenizer = Tokenizer.load(embedded)
    text = "ab1" * 350_000
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


def test_a_replaced_file_is_read_again(tmp_path):
    assert Tokenizer.load(toy_folder(tmp_path)).vocab_size == 512
    assert Tokenizer.load(toy_folder(tmp_path, words=("ab",))).vocab_size == 513


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    tokenizer = Tokenizer.load(toy_folder(tmp_path))
    for token_id in (-1, 512):
        with pytest.raises(ValueError, match=f"{token_id} is outside the vocabulary of 512"):
            tokenizer.token_bytes(token_id)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file"),
        ("YQ== 0\nnot base64! 1\n", "line 2"),
        ("YQ== 0\nYg==\n", "line 2"),
        ("YQ== 0\nYQ== 1\n", "line 2"),
        ("YQ== 0\nYg== x\n", "line 2"),
        ("YQ== 0\nYg== 2\n", "ranks must be 0 .. 1"),
        ("YQ== 0\n", "no token for the single byte 0x00"),
        ("", "no token for the single byte 0x00"),
    ],
)
def test_a_broken_vocabulary_is_named_in_one_line(tmp_path, content, message):
    path = toy_folder(tmp_path) / "tiktoken.model"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert message in str(caught.value) and "tiktoken.model" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "added, message",
    [
        ({"5": {"content": "[EOS]"}}, "control tokens have ids 256 .. 511"),
        ({"600": {"content": "[EOS]"}}, "control tokens have ids 256 .. 511"),
        ({"256": {"content": "[A]"}, "257": {"content": "[A]"}}, "two control tokens"),
        ({"256": {"special": True}}, "has no content"),
        ({"x": {"content": "[A]"}}, "added_tokens_decoder['x']"),
    ],
)
def test_broken_control_tokens_are_named(tmp_path, added, message):
    write_ranks(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert message in str(caught.value)


def test_without_a_tokenizer_config_control_tokens_have_reserved_names(tmp_path):
    write_ranks(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 512 and tokenizer.name_of(300) == "<|reserved_token_300|>"
    assert tokenizer.stop_ids == frozenset()
    assert set(NAMES.values()).isdisjoint(tokenizer.specials)
