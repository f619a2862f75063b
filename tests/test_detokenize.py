"""Text while it is being made: split characters, invalid bytes, stop strings."""

import random

import pytest

from ddtree_numba.detokenize import Detokenizer, first_stop, open_stop
from ddtree_numba.tokenizer import Tokenizer
from tests.toys import toy_folder

PAD, END, CLOSE = 511, 258, 279


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Token i is byte i."""
    return Tokenizer.load(toy_folder(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Tokenizer:
    """Tokens 256 " ha", 257 " no"; control tokens from 258."""
    return Tokenizer.load(toy_folder(tmp_path_factory.mktemp("words"), words=(" ha", " no")))


def stream(tokenizer: Tokenizer, ids, stop=()) -> tuple[list[str], str]:
    """What each push returned, and what flush did."""
    detokenizer = Detokenizer(tokenizer, tuple(stop))
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.flush()


@pytest.mark.parametrize(
    "data, pushed, flushed",
    [
        (b"\xf0\x9f\x98\x80", ["", "", "", "😀"], ""),
        (b"\xe4\xbd\xa0", ["", "", "你"], ""),
        (b"\xf0\x9f", ["", ""], "\ufffd"),
        (b"\x80", ["\ufffd"], ""),
        (b"\xf0\x9fA", ["", "", "\ufffdA"], ""),
        (b"\xf0\x9f\xf0\x9f\x98\x80", ["", "", "\ufffd", "", "", "😀"], ""),
        (b"a\xc3\xa9\xff", ["a", "", "é", "\ufffd"], ""),
        (b"", [], ""),
    ],
)
def test_t04_characters_split_over_tokens(tokenizer, data, pushed, flushed):
    assert stream(tokenizer, data) == (pushed, flushed)
    assert "".join(pushed) + flushed == tokenizer.decode(data)


def test_t04_joined_stream_is_the_text_of_all_ids(tokenizer):
    random.seed(4)
    for _ in range(300):
        ids = random.choices([*range(256), PAD, CLOSE, 0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xBD], k=40)
        pushed, flushed = stream(tokenizer, ids)
        assert "".join(pushed) + flushed == tokenizer.decode(ids)


def test_t03_hidden_tokens_give_no_text_and_split_no_character(tokenizer):
    assert stream(tokenizer, [97, PAD, END, 98]) == (["a", "", "", "b"], "")
    assert stream(tokenizer, [0xE4, PAD, 0xBD, 0xA0]) == (["", "", "", "你"], "")
    assert stream(tokenizer, [CLOSE]) == (["</think>"], "")


def test_s05_stop_string_across_tokens(words):
    detokenizer = Detokenizer(words, (" ha ha ha",))
    ids = [256, 256, 256, 257, 257]
    texts = []
    while not detokenizer.stopped:
        texts.append(detokenizer.push(ids[len(texts)]))
    assert texts == ["", "", ""] and detokenizer.flush() == ""


def test_s05_a_stop_string_that_does_not_come_is_given_back(words):
    assert stream(words, [256, 256, 257], [" ha ha ha"]) == (["", "", " ha ha no"], "")
    assert stream(words, [257, 256, 256], [" ha ha ha"]) == ([" no", "", ""], " ha ha")


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("abcd", ["cd"], "ab"),
        ("abcd", ["abcd"], ""),
        ("abcd", ["d", "bcd"], "a"),  # both end at d: the longer one
        ("abcd", ["abc", "b"], "a"),  # b is complete first
        ("aabaaab", ["aaab"], "aab"),  # overlapping beginnings
        ("a\nb\n\nc", ["\n\n"], "a\nb"),
        ("你好", ["好"], "你"),
        ("x</think>y", ["</think>"], "x"),
    ],
)
def test_s05_the_stop_string_that_ends_first_cuts(tokenizer, text, stop, expected):
    ids = tokenizer.encode(text)
    pushed, flushed = stream(tokenizer, ids, stop)
    assert "".join(pushed) + flushed == expected


def test_s05_any_split_gives_the_same_text(tmp_path):
    alphabet = ["a", "b", "é", "ab", "ba", "aab", "éa"]
    tokenizer = Tokenizer.load(toy_folder(tmp_path, words=tuple(alphabet[3:])))
    ids_of = {text: tokenizer.ranks.get(text.encode()) for text in alphabet}
    random.seed(5)
    for _ in range(500):
        pieces = random.choices(alphabet, k=12)
        stop = tuple(random.sample(["ab", "baa", "éé", "aaa", "bab", "b"], 2))
        ids = [
            token_id
            for piece in pieces
            for token_id in ([ids_of[piece]] if ids_of[piece] is not None else piece.encode())
        ]
        pushed, flushed = stream(tokenizer, ids, stop)
        assert "".join(pushed) + flushed == one_by_one("".join(pieces), stop)


def one_by_one(text: str, stop: tuple[str, ...]) -> str:
    """The rule itself: read characters until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def test_s05_nothing_after_a_stop_string(tokenizer):
    detokenizer = Detokenizer(tokenizer, ("b",))
    assert [detokenizer.push(t) for t in b"abcd"] == ["a", "", "", ""]
    assert detokenizer.stopped and detokenizer.flush() == ""


def test_a_stop_string_may_end_with_a_cut_character(tokenizer):
    assert stream(tokenizer, b"a\xf0", ["\ufffd"]) == (["a", ""], "")


def test_an_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(ValueError, match="must not be empty"):
        Detokenizer(tokenizer, ("x", ""))


def test_only_an_ending_that_may_become_a_stop_string_is_held():
    assert open_stop("xa", ("ab", "aac")) == 1
    assert open_stop("xaa", ("ab", "aac")) == 2
    assert open_stop("xb", ("ab",)) == 0
    assert open_stop("", ("ab",)) == open_stop("a", ()) == 0
    assert first_stop("xab", ("ab", "b")) == 1 and first_stop("x", ("ab",)) is None
