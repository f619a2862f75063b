"""Reasoning and answer, told apart from how the prompt ends."""

import itertools

import pytest

from ddtree_numba.chat import Chat
from ddtree_numba.reasoning import ReasoningParser
from ddtree_numba.tokenizer import Tokenizer

SECTION = "<|tool_calls_section_begin|>"


def parse(inside: bool | None, chunks) -> tuple[str, str]:
    parser = ReasoningParser(inside)
    parts = [*(parser.push(chunk) for chunk in chunks), parser.flush()]
    return "".join(p[0] for p in parts), "".join(p[1] for p in parts)


CASES = [
    (True, "x</think>y", ("x", "y")),
    (True, "</think>y", ("", "y")),
    (True, "x is cut", ("x is cut", "")),
    (True, "x</thin", ("x</thin", "")),
    (True, "a < b</think>c < d</think>", ("a < b", "c < d</think>")),
    (True, f"x{SECTION}call", ("x", f"{SECTION}call")),
    (True, f"x</think>{SECTION}", ("x", SECTION)),
    (False, "y", ("", "y")),
    (False, "y</think>z", ("", "y</think>z")),
    (None, "<think>x</think>y", ("x", "y")),
    (None, "y <think>", ("", "y <think>")),
    (None, "<th", ("", "<th")),
    (None, "", ("", "")),
]


@pytest.mark.parametrize("inside, text, expected", CASES)
def test_t06_whole_and_letter_by_letter(inside, text, expected):
    assert parse(inside, [text]) == expected
    assert parse(inside, text) == expected


@pytest.mark.parametrize("inside, text, expected", CASES)
def test_t06_a_tag_split_over_two_chunks(inside, text, expected):
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert parse(inside, [text[:first], text[first:second], text[second:]]) == expected


def test_t06_what_is_sure_is_not_held_back():
    parser = ReasoningParser(True)
    assert parser.push("abc") == ("abc", "")
    assert parser.push("d</th") == ("d", "")
    assert parser.push("e") == ("</the", "")
    assert parser.push("</think>f") == ("", "f")


@pytest.mark.parametrize("thinking", [True, False])
def test_t06_the_state_starts_from_the_rendered_prompt(embedded, thinking):
    tokenizer = Tokenizer.load(embedded)
    ids = Chat.load(embedded, tokenizer).render([{"role": "user", "content": "Hi"}], thinking)
    assert ReasoningParser.after_prompt(tokenizer, ids).inside is thinking


def test_t06_literal_tags_in_the_prompt_decide_nothing(embedded):
    tokenizer = Tokenizer.load(embedded)
    assert ReasoningParser.after_prompt(tokenizer, tokenizer.encode("<think>")).inside is None
    assert ReasoningParser.after_prompt(tokenizer, []).inside is None
