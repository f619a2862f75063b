"""Many prompts: an input with a record a line, and an output that can be taken up again."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from ddtree_numba.options import UsageError
from ddtree_numba.screen import naming

RESULT = b'{"index": '  # how every result begins


def dumps(record: dict[str, Any]) -> str:
    """One line of JSON; a number that is not finite becomes null, since JSON has none."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def read_bytes(path: str) -> bytes:
    """What a file named by an option holds; UsageError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def read_records(path: str) -> list[str | dict[str, Any]]:
    """The records of a JSON lines file: strings or objects; empty lines do not count."""
    records: list[str | dict[str, Any]] = []
    for number, line in _lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError(f"{path}, line {number}: not JSON: {line[:60]!r}") from None
        if not isinstance(record, str | dict):
            raise UsageError(f"{path}, line {number}: neither a string nor an object")
        records.append(record)
    if not records:
        raise UsageError(f"{path}: no records")
    return records


class Output:
    """The results of one input: `finished` holds them by index, earlier runs' too; `write` appends.

    A last line without its line ending was torn by an interruption: it is cut off.
    """

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.finished: dict[int, dict[str, Any]] = {}
        if Path(path).exists():
            if not Path(path).is_file() and not Path(path).is_dir():
                raise UsageError(f"{path}: not a file: results are looked up in it, and kept")
            if os.path.samefile(path, source):
                raise UsageError("--output must be another file than --input")
            self._take_up()
        try:
            self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None

    def _take_up(self) -> None:
        data = read_bytes(self.path)
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                index = record["index"]
                if type(index) is not int:
                    raise TypeError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UsageError(
                    f"{self.path}, line {number}: not a result of this command; nothing was changed"
                ) from None
            if index in self.finished:
                raise UsageError(f"{self.path}, line {number}: index {index} is there twice")
            self.finished[index] = record
        torn = data[whole:]
        if torn:
            if not (torn.startswith(RESULT) or RESULT.startswith(torn)):
                raise UsageError(
                    f"{self.path}: its last line is no result of this command; nothing was changed"
                )
            os.truncate(self.path, whole)

    def write(self, record: dict[str, Any]) -> None:
        """Append one result, for good: an interruption later loses no line written before."""
        with naming(self.path):
            self._file.write(dumps(record) + "\n")
            self._file.flush()
        self.finished[record["index"]] = record

    def close(self) -> None:
        with naming(self.path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _lines(path: str) -> Iterator[tuple[int, str]]:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: offset {error.start}") from None
    # Not splitlines(): a JSON string may hold U+2028 and the like.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
