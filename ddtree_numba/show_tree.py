"""The tree of a round as text, for people.

    round 2: 7 nodes, 2 drafted tokens accepted + bonus = 3 tokens
    "return"
    ├─ * " self" 62% → * "." 58%
    │  ├─ + "name"
    │  └─ "value" 12%
    └─ " x" 21%, " y" 4%, " z" 1%

An only child follows its parent on the same line, behind an arrow; siblings without children share
a line. The percentage is the drafter's probability of the whole path down to a node. `*` marks the
accepted path, `+` the bonus token: the target's own choice where the tree ended or held another.
"""

import json
import math
import os
from typing import TextIO

from ddtree_numba.answer import counted
from ddtree_numba.request import RoundTrace
from ddtree_numba.tokenizer import Tokenizer

LINE_NODES = 6  # nodes on one line before a chain is broken
BOX = {"branch": "├─ ", "last": "└─ ", "down": "│  ", "blank": "   ", "then": " → "}
ASCII = {"branch": "|- ", "last": "`- ", "down": "|  ", "blank": "   ", "then": " -> "}
GREEN, YELLOW, DIM, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


class TreeText:
    """Draws rounds for one stream: colours on a terminal only, ASCII where it cannot draw lines."""

    def __init__(self, tokenizer: Tokenizer, stream: TextIO) -> None:
        self.tokenizer = tokenizer
        self.colour = stream.isatty() and not os.environ.get("NO_COLOR")  # see no-color.org
        try:
            "".join(BOX.values()).encode(stream.encoding or "ascii")
            self.lines = BOX
        except UnicodeEncodeError:
            self.lines = ASCII

    def draw(self, trace: RoundTrace, number: int) -> str:
        """The lines of one round, each ended; `number` counts rounds from 1."""
        children: list[list[int]] = [[] for _ in range(trace.size)]
        for node in range(1, trace.size):
            children[trace.parents[node]].append(node)
        path = [0, *(node for node in trace.accepted if node != 0)]
        lines = [self._heading(trace, number, len(path) - 1), self._token(trace, 0)]
        self._branches(trace, children, path, 0, "", lines)
        return "".join(line + "\n" for line in lines)

    def _heading(self, trace: RoundTrace, number: int, accepted: int) -> str:
        whole = accepted + 1
        text = (
            f"round {number}: {counted(trace.size, 'node')},"
            f" {counted(accepted, 'drafted token')} accepted + bonus = {counted(whole, 'token')}"
        )
        if trace.emitted < whole:
            text += f", {trace.emitted} emitted before the end"
        return self._paint(text, DIM)

    def _branches(
        self,
        trace: RoundTrace,
        children: list[list[int]],
        path: list[int],
        node: int,
        indent: str,
        lines: list[str],
    ) -> None:
        """Append what is below `node`: the bonus token, then each child with what is below it."""
        rows: list[tuple[str, int | None]] = []  # text, and the node to go on below
        if node == path[-1]:
            rows.append((self._bonus(trace), None))
        leaves: list[str] = []
        for child in children[node]:
            if not children[child] and child not in path and leaves and len(leaves) < LINE_NODES:
                leaves.append(self._node(trace, child, False))
                rows[-1] = (", ".join(leaves), None)
                continue
            run = [child]
            while len(children[run[-1]]) == 1 and run[-1] != path[-1] and len(run) < LINE_NODES:
                run += children[run[-1]]
            text = self.lines["then"].join(self._node(trace, step, step in path) for step in run)
            leaves = [text] if not children[child] and child not in path else []
            rows.append((text, run[-1]))
        for number, (text, below) in enumerate(rows, 1):
            last = number == len(rows)
            lines.append(indent + self.lines["last" if last else "branch"] + text)
            if below is not None:
                deeper = indent + self.lines["blank" if last else "down"]
                self._branches(trace, children, path, below, deeper, lines)

    def _node(self, trace: RoundTrace, node: int, accepted: bool) -> str:
        probability = math.exp(min(float(trace.scores[node]), 0.0))
        percent = "<1%" if probability < 0.01 else f"{100 * probability:.0f}%"
        text = f"{self._token(trace, node)} {percent}"
        return self._paint(f"* {text}", GREEN) if accepted else text

    def _bonus(self, trace: RoundTrace) -> str:
        if trace.next_token < 0:
            return self._paint("+ none: the logits are not finite", YELLOW)
        return self._paint(f"+ {quoted(self.tokenizer, trace.next_token)}", YELLOW)

    def _token(self, trace: RoundTrace, node: int) -> str:
        return quoted(self.tokenizer, int(trace.tokens[node]))

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{PLAIN}" if self.colour else text


def quoted(tokenizer: Tokenizer, token_id: int) -> str:
    """A token in quotes, line ends and broken bytes escaped; the name of a control token."""
    name = tokenizer.name_of(token_id)
    if name is not None:
        return name
    text = tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")
    return json.dumps(text, ensure_ascii=False).replace("\\\\x", "\\x")
