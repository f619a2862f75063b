"""Running the command inside the test process."""

import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ddtree_numba.generate import main

ROOT = Path(__file__).resolve().parents[1]


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on standard output."""
        assert self.code == 0 and self.out.endswith("\n") and self.out.count("\n") == 1, self
        return json.loads(self.out, parse_constant=refuse_constant)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Stdin(io.TextIOWrapper):
    """Standard input that holds bytes; a terminal refuses to be read."""

    def __init__(self, data: bytes | None) -> None:
        super().__init__(io.BytesIO(data or b""))
        self.terminal = data is None

    def isatty(self) -> bool:
        return self.terminal


def run(monkeypatch, capsys, *argv: str, stdin: bytes | None = None) -> Ran:
    """Exit code and what was written; without `stdin`, standard input is a terminal."""
    monkeypatch.setattr(sys, "stdin", Stdin(stdin))
    capsys.readouterr()
    try:
        code = main(list(argv))
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return Ran(code, out, err)
