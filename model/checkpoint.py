"""The files of a checkpoint folder: index, safetensors headers, slices of tensors.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape,
data_offsets), then the tensors back to back. Everything that headers can tell is checked before a
tensor is read.
"""

import json
import os
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ddtree_numba.model.fields import CheckpointError, read_json
from ddtree_numba.model.reading import Files, Part, grouped, read_group

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
# Others occur in tensors that are skipped, or are named in an error.
ITEMSIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
ITEMSIZES |= {"F64": 8, "U64": 8, "U32": 4, "F16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1}
ITEMSIZES |= {"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class Entry(NamedTuple):
    """Where a tensor lies: bytes start..stop of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Checkpoint:
    """A folder of safetensors files; `tensors` maps each stored name to its entry."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files, listed = _read_index(self.folder)
        self.tensors: dict[str, Entry] = {}
        self.shards = Files()
        for path in self.files:
            for name, entry in _entries_of(path, self.shards.descriptor(path)).items():
                if name in self.tensors:
                    other = self.tensors[name].path.name
                    raise CheckpointError(f"{path}: tensor {name} is also in {other}")
                self.tensors[name] = entry
        if listed is not None:
            self._compare(listed)

    def _compare(self, listed: dict[str, str]) -> None:
        index = self.folder / INDEX
        for name, file in listed.items():
            entry = self.tensors.get(name)
            if entry is None or entry.path.name != file:
                where = f"it is in {entry.path.name}" if entry else "no file has it"
                raise CheckpointError(f"{index}: places tensor {name} in {file}, but {where}")
        for name in sorted(self.tensors.keys() - listed.keys()):
            path = self.tensors[name].path
            raise CheckpointError(f"{path}: tensor {name} is not in {INDEX}")

    def part(self, entry: Entry, out: np.ndarray, rows: slice, columns: slice) -> Part:
        """The reading of tensor[rows, columns] into `out`; of a vector, tensor[rows]."""
        width = prod(entry.shape[1:])
        first, _, _ = rows.indices(entry.shape[0])
        words = np.dtype(f"u{out.itemsize}")  # numpy copies integers without its global lock
        target = out.view(words).reshape(len(out), prod(out.shape[1:]))
        return Part(entry.path, entry.start + first * width * out.itemsize, width, columns, target)

    def read(self, entry: Entry, out: np.ndarray, rows: slice, columns: slice) -> None:
        """Copy tensor[rows, columns] into `out`, at once."""
        for group in grouped([self.part(entry, out, rows, columns)]):
            read_group(self.shards, group)


def shard_files(folder: Path) -> list[Path]:
    """The files that hold its tensors; CheckpointError if some are missing."""
    return _read_index(folder)[0]


def _read_index(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """(files, tensor name -> file name); the second is None for a checkpoint of one file."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).is_file():
            complaint = f"neither {INDEX} nor {SINGLE} in it; is the download complete?"
            raise CheckpointError(f"{folder}: {complaint}")
        return [folder / SINGLE], None
    index = folder / INDEX
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map is missing or lists no tensors")
    names = sorted({str(file) for file in listed.values()})
    for name in names:
        # A name that leads out of the folder is no shard; str() turned other JSON values into one.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: weight_map: {name!r} is not a file name")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        some = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        complaint = f"{len(missing)} of {len(names)} files are missing ({some})"
        raise CheckpointError(f"{index}: {complaint}; is the download complete?")
    return [folder / name for name in names], listed


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, once it is known to have exactly the bytes its header promises."""
    files = Files()
    return _entries_of(path, files.descriptor(path))


def _entries_of(path: Path, descriptor: int) -> dict[str, Entry]:
    size = os.fstat(descriptor).st_size
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file")
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if length > min(HEADER_LIMIT, size - 8):
        raise CheckpointError(f"{path}: header of {length} bytes in a file of {size} bytes")
    raw = os.pread(descriptor, length, 8)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = dict(_entries(path, header, 8 + length))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        # Not repr(): that of a UnicodeDecodeError holds all of the header.
        complaint = f"broken safetensors header: {type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: {complaint}") from None
    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            kind = "overlaps its neighbour" if entry.start < position else "follows a gap"
            raise CheckpointError(f"{path}: tensor {name} {kind} at byte {entry.start}")
        position = entry.stop
    if position != size:
        kind = "cut short" if size < position else "trailing bytes"
        raise CheckpointError(f"{path}: expected {position} bytes, found {size} ({kind})")
    return entries


def _entries(path: Path, header: dict, base: int) -> Iterator[tuple[str, Entry]]:
    for name, item in header.items():
        dtype, shape = item["dtype"], tuple(item["shape"])
        start, stop = item["data_offsets"]
        numbers = (*shape, start, stop)
        if {type(n) for n in numbers} != {int} or min(numbers) < 0:
            raise CheckpointError(f"{path}: tensor {name}: bad shape or offsets")
        if dtype not in ITEMSIZES:
            raise CheckpointError(f"{path}: tensor {name}: unknown dtype {dtype!r}")
        expected = prod(shape) * ITEMSIZES[dtype]
        if stop - start != expected:
            complaint = f"{dtype} {list(shape)} needs {expected} bytes, has {stop - start}"
            raise CheckpointError(f"{path}: tensor {name}: {complaint}")
        yield name, Entry(path, dtype, shape, base + start, base + stop)
