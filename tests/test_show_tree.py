"""The tree of a round as text."""

import io
import math

import numpy as np
import pytest

from ddtree_numba.request import RoundTrace
from ddtree_numba.show_tree import GREEN, TreeText, quoted
from ddtree_numba.tokenizer import Tokenizer
from tests.toys import toy_folder


class Stream(io.StringIO):
    """A stream with an encoding, and a terminal if asked."""

    def __init__(self, encoding="utf-8", terminal=False):
        super().__init__()
        self._encoding, self._terminal = encoding, terminal

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self._terminal


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(toy_folder(tmp_path_factory.mktemp("toy"), words=(" self", "name")))


def trace(tokens, parents, accepted, next_token, emitted=None, percents=None) -> RoundTrace:
    scores = np.log(np.array([100, *(percents or [50] * (len(tokens) - 1))]) / 100)
    emitted = len(accepted) if emitted is None else emitted
    return RoundTrace(
        tokens=np.array(tokens),
        parents=np.array(parents),
        scores=scores.astype(np.float32),
        size=len(tokens),
        accepted=accepted,
        next_token=next_token,
        emitted=emitted,
    )


def test_accepted_path_bonus_and_probabilities(tokenizer):
    tokens = [ord("r"), 256, ord("x"), ord("."), ord("y"), ord("v"), ord("w")]
    one = trace(tokens, [-1, 0, 0, 1, 0, 3, 3], [0, 1, 3], 257, 3, [62, 21, 58, 4, 12, 0.4])
    assert TreeText(tokenizer, Stream()).draw(one, 2) == (
        "round 2: 7 nodes, 2 drafted tokens accepted + bonus = 3 tokens\n"
        '"r"\n'
        '├─ * " self" 62% → * "." 58%\n'
        '│  ├─ + "name"\n'
        '│  └─ "v" 12%, "w" <1%\n'
        '└─ "x" 21%, "y" 4%\n'
    )


def test_root_alone(tokenizer):
    text = TreeText(tokenizer, Stream()).draw(trace([97], [-1], [0], 98), 1)
    assert text == 'round 1: 1 node, 0 drafted tokens accepted + bonus = 1 token\n"a"\n└─ + "b"\n'


def test_padding_beyond_size_is_not_drawn(tokenizer):
    one = trace([97, 98, -1, -1], [-1, 0, -1, -1], [0, 1], 99)
    text = TreeText(tokenizer, Stream()).draw(RoundTrace(**{**vars(one), "size": 2}), 1)
    assert text.splitlines()[1:] == ['"a"', '└─ * "b" 50%', '   └─ + "c"']


def test_chain_is_one_line_broken_when_long(tokenizer):
    tokens, parents = list(range(97, 107)), list(range(-1, 9))
    lines = TreeText(tokenizer, Stream()).draw(trace(tokens, parents, [0], 65), 1).splitlines()
    assert lines[2] == '├─ + "A"'
    assert lines[3].count("→") == 5 and lines[4].startswith("   └─ ") and len(lines) == 5


def test_every_node_is_drawn_once_in_any_tree(tokenizer):
    rng = np.random.default_rng(7)
    for size in [1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 17, 33, 65]:
        parents = [-1, *(int(rng.integers(node)) for node in range(1, size))]
        path = [int(rng.integers(size))]  # accepted up to any node
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        tokens = [32 + node for node in range(size)]  # all printable, all different
        text = TreeText(tokenizer, Stream()).draw(trace(tokens, parents, path[::-1], 255), 1)
        for token in tokens:
            assert text.count(f"{quoted(tokenizer, token)}") == 1
        assert text.count("* ") - text.count('"* ') == len(path) - 1
        assert text.count("+ ") == 2 and "\x1b" not in text


def test_a_round_cut_by_the_end_says_so(tokenizer):
    one = trace([97, 98, 99], [-1, 0, 1], [0, 1, 2], 100, emitted=2)
    heading = TreeText(tokenizer, Stream()).draw(one, 1).splitlines()[0]
    assert heading.endswith("= 3 tokens, 2 emitted before the end")


def test_a_missing_bonus_token_is_explained(tokenizer):
    text = TreeText(tokenizer, Stream()).draw(trace([97], [-1], [0], -1, emitted=0), 1)
    assert "+ none: the logits are not finite" in text


def test_colours_on_a_terminal_only_and_ascii_where_lines_cannot_be_drawn(tokenizer, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    one = trace([97, 98, 99, 100], [-1, 0, 1, 0], [0, 1], 101)
    assert GREEN in TreeText(tokenizer, Stream(terminal=True)).draw(one, 1)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in TreeText(tokenizer, Stream(terminal=True)).draw(one, 1)
    plain = TreeText(tokenizer, Stream("ascii")).draw(one, 1)
    assert plain.isascii() and '|- * "b" 50%' in plain and "`- " in plain


def test_tokens_are_quoted_so_that_they_can_be_told_apart(tokenizer):
    assert quoted(tokenizer, ord("\n")) == r'"\n"'
    assert quoted(tokenizer, ord('"')) == r'"\""'
    assert quoted(tokenizer, 0xF0) == r'"\xf0"'
    assert quoted(tokenizer, 256) == '" self"'
    assert quoted(tokenizer, tokenizer.id_of("</think>")) == "</think>"


def test_a_probability_is_never_above_one(tokenizer):
    one = trace([97, 98], [-1, 0], [0], 99)
    one.scores[1] = 1e-7
    assert '"b" 100%' in TreeText(tokenizer, Stream()).draw(one, 1)
    one.scores[1] = -math.inf
    assert '"b" <1%' in TreeText(tokenizer, Stream()).draw(one, 1)
