"""The file of one rank's packed weights: written once, under another name until it is complete.

| bytes        | content                                                                   |
|--------------|---------------------------------------------------------------------------|
| 8            | MAGIC                                                                     |
| ...          | arrays, each from a multiple of ALIGN on                                  |
| table        | JSON: what it was made from, then a row a field, in the order of reading  |
| 20           | length of the table, its CRC-32, MAGIC                                    |

Arrays carry a CRC-32 for each BLOCK bytes, which is checked before they are used.
"""

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_numba.model.reading import Ahead, Files, Task
from ddtree_numba.spec.numerics import BF16, Int4Matrix

MAGIC = b"DDTPACK1"
ALIGN = 4096
BLOCK = 1 << 22  # bytes under one checksum, which are read at once
DIRTY = 1 << 28  # bytes after which the disk is waited for, rather than for all at the end
END = struct.Struct("<QI8s")
DTYPES = {"bfloat16": BF16} | {n: np.dtype(n) for n in ("float32", "int32", "uint32")}

# kind of a weight -> its members, with the type of each in the table
MEMBERS: dict[str, dict[str, type]] = {
    "ndarray": {"": dict},
    "Int4Matrix": {"packed": dict, "scale": dict, "shape": list},
    "Records": {"words": dict, "shape": list, "gated": bool},
}


class PackedError(ValueError):
    """A file that cannot be used, in one line; the checkpoint can."""


class Writer:
    """Writes the file at `path`; OSError if that cannot be."""

    def __init__(self, path: Path, made_from: dict[str, Any]) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        if self.partial.is_symlink():  # what it points to is no file of ours
            raise OSError(f"{self.partial} is a symbolic link")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self.file = open(os.open(self.partial, flags, 0o644), "wb")  # noqa: SIM115
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self.file.fileno()).st_ino != self.partial.stat().st_ino:
                raise OSError("another process has just written it")
        except BlockingIOError:
            self.file.close()
            raise OSError("another process is writing it") from None
        except OSError:
            self.file.close()
            raise
        self.file.truncate(0)
        self.file.write(MAGIC)
        self._dirty = 0
        self.rows: list[dict[str, Any]] = []
        self.made_from = made_from

    def add(self, field: str, weight: np.ndarray | Any) -> None:
        """One weight: an array, or a dataclass of arrays and plain values."""
        row: dict[str, Any] = {"field": field, "kind": type(weight).__name__}
        row["values"] = {name: self._stored(value) for name, value in _members(weight).items()}
        self.rows.append(row)

    def _stored(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        self.file.write(bytes(-self.file.tell() % ALIGN))
        raw = np.ascontiguousarray(value).view(np.uint8).reshape(-1).data
        start = self.file.tell()
        blocks = [raw[i : i + BLOCK] for i in range(0, len(raw), BLOCK)]
        for block in blocks:
            self.file.write(block)
            self._dirty += len(block)
            if self._dirty >= DIRTY:
                self._sync()
        checks = [zlib.crc32(block) for block in blocks]
        return {"dtype": value.dtype.name, "shape": value.shape, "start": start, "crc32": checks}

    def finish(self) -> None:
        """Make the file appear, complete."""
        table = json.dumps({"made_from": self.made_from, "rows": self.rows}).encode()
        self.file.write(table + END.pack(len(table), zlib.crc32(table), MAGIC))
        self._sync()
        os.replace(self.partial, self.path)
        self.file.close()

    def _sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self._dirty = 0

    def abandon(self) -> None:
        with suppress(OSError):
            self.partial.unlink()
        with suppress(OSError):
            self.file.close()


def read_table(files: Files, path: Path) -> dict[str, Any]:
    """The table; PackedError if the file is not whole."""
    descriptor = files.descriptor(path)
    size = os.fstat(descriptor).st_size
    raw = os.pread(descriptor, END.size, max(0, size - END.size))
    length, check, magic = END.unpack(raw) if len(raw) == END.size else (0, 0, b"")
    if magic != MAGIC or length > size - END.size:
        raise PackedError(f"{path}: cut short, or no file of packed weights")
    start = size - END.size - length
    raw = os.pread(descriptor, length, start)
    try:
        table = json.loads(raw) if zlib.crc32(raw) == check else {}
        rows = all(_is_row(row, start) for row in table["rows"])
        if rows and isinstance(table["made_from"], dict):
            return table
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise PackedError(f"{path}: its table is damaged")


class PackedSource:
    """The fields of a file, each taken once, in its order."""

    def __init__(
        self,
        files: Files,
        path: Path,
        rows: list[dict[str, Any]],
        place: Callable[[Any, str], Any],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.files, self.path, self.place = files, path, place
        self.rows = {row["field"]: row for row in rows}
        sizes = {
            field: sum(_nbytes(value) for value in row["values"].values() if _is_array(value))
            for field, row in self.rows.items()
        }
        self._ahead = Ahead(sizes, self._begin, progress)
        self.finish = self._ahead.finish

    def stored(self, field: str) -> Any:
        return self._ahead.take(field)

    def dense(self, field: str) -> Any:
        return self.place(self.stored(field), field)

    int4 = dense

    def _begin(self, field: str) -> tuple[Any, list[Task]]:
        row = self.rows[field]
        values, tasks = dict(row["values"]), list[Task]()
        for name, value in row["values"].items():
            if not _is_array(value):
                continue
            values[name] = np.empty(value["shape"], DTYPES[value["dtype"]])
            raw = values[name].view(np.uint8).reshape(-1)
            for i, check in enumerate(value["crc32"]):
                block, start = raw[i * BLOCK : (i + 1) * BLOCK], value["start"] + i * BLOCK
                tasks.append(partial(self._read, field, start, block, check))
        return _weight(row["kind"], values), tasks

    def _read(self, field: str, start: int, block: np.ndarray, check: int) -> int:
        self.files.read(self.path, start, block)
        if zlib.crc32(block.data) != check:
            raise PackedError(f"{self.path}: {field} is damaged at byte {start}")
        return block.nbytes

    def close(self) -> None:
        self._ahead.close()


def _is_row(row: dict[str, Any], end: int) -> bool:
    """Is it as `Writer.add` makes it, of arrays that lie before `end`?"""
    types, values = MEMBERS[row["kind"]], row["values"]
    return (
        isinstance(row["field"], str)
        and {name: type(value) for name, value in values.items()} == types
        and all(_is_stored(value, end) for value in values.values() if _is_array(value))
        and all(_is_shape(value) for value in values.values() if isinstance(value, list))
    )


def _is_stored(value: dict[str, Any], end: int) -> bool:
    start, checks = value["start"], value["crc32"]
    if not (_is_shape(value["shape"]) and type(start) is int and isinstance(checks, list)):
        return False
    if min(value["shape"]) < 0:
        return False
    size = _nbytes(value)
    return len(MAGIC) <= start <= end - size and len(checks) == -(-size // BLOCK)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(n) is int for n in value)


def _is_array(value: Any) -> bool:
    return isinstance(value, dict)


def _nbytes(value: dict[str, Any]) -> int:
    return prod(value["shape"]) * DTYPES[value["dtype"]].itemsize


def _members(weight: Any) -> dict[str, Any]:
    if isinstance(weight, np.ndarray):
        return {"": weight}
    return {field.name: getattr(weight, field.name) for field in fields(weight)}


def _weight(kind: str, values: dict[str, Any]) -> Any:
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    if kind == "ndarray":
        return values[""]
    if kind == "Int4Matrix":
        return Int4Matrix(**values)
    from ddtree_numba.kernels.moe_records import Records  # needs Numba, as whoever stored it has

    return Records(**values)
