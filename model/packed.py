"""Packed weights beside a checkpoint: what a rank keeps of it, in the order in which it is read.

A rank's slices are contiguous there, experts in the backend's own layout, and no header has to be
checked. A file is used only if it was made from the very files that are there now (names, sizes,
times of change, the index itself), by this version, for this configuration, backend and rank;
otherwise, or if it is damaged, a line says so and it is made anew.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ddtree_numba.model.checkpoint import INDEX, shard_files
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.model.packed_file import PackedError, PackedSource, Writer, read_table
from ddtree_numba.model.reading import Files
from ddtree_numba.model.source import Build, CheckpointSource, Order, Place, Progress

FORMAT = 2  # to be raised when what is stored changes, Records too
SPARE = 1 << 30  # bytes of the disk that stay free
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Packed:
    """Where packed weights are kept, for which backend; `note` gets a line for the user.

    keep(tensor, placed) -> what is stored of a weight, given as `place` takes it and as it gives
    it; `place` takes that too.
    """

    folder: Path
    backend: str
    keep: Callable[[Any, Any], Any]
    note: Callable[[str], None]
    _told: set[str] = field(default_factory=set, init=False, compare=False)

    def load(
        self,
        folder: Path,
        config: Any,
        rank: int,
        world: int,
        build: Build,
        place: Place,
        progress: Progress | None,
    ) -> Any:
        """The weights that are kept of the checkpoint in `folder`, or None."""
        path, files = self._path(folder, rank, world), Files()
        try:
            # A FIFO would be waited for. What is there instead of a file, or that the folder may
            # not be looked into, `recording` says.
            if not os.path.isfile(path):
                return None
            table = read_table(files, path)
            changed = difference(table["made_from"], self._origin(folder, config, rank, world))
            if changed:
                raise PackedError(f"{path}: made from another {changed}")
            if [row["field"] for row in table["rows"]] != asked(build):
                raise PackedError(f"{path}: holds other weights than are asked for")
            with closing(PackedSource(files, path, table["rows"], place, progress)) as source:
                weights = build(source)
                source.finish()
            return weights
        except OSError as error:
            reason = f"{error.filename or path}: {error.strerror or error}"
            self.note(f"{reason}; loading {folder} instead")
            return None
        except (PackedError, CheckpointError) as error:
            self.note(f"{error}; loading {folder} instead")
            return None
        finally:
            files.close()

    def recording(
        self, source: CheckpointSource, folder: Path, config: Any, rank: int, world: int
    ) -> "Recording":
        """The same source, which also writes what it gives."""
        path = self._path(folder, rank, world)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise OSError("what is there is no file")
            path.unlink(missing_ok=True)  # of no use any more, but in the way of the new one
            free = shutil.disk_usage(self.folder).free
            if source.total + SPARE > free:
                raise OSError(f"{source.total / 1e9:.1f} GB do not fit into {free / 1e9:.1f}")
            writer = Writer(path, self._origin(folder, config, rank, world))
        except OSError as error:
            self._not_written(path, error)
            writer = None
        return Recording(source, writer, self)

    def _not_written(self, path: Path, error: OSError) -> None:
        """A line; one for all files if it is the folder that cannot be written."""
        reason = error.strerror or error
        line = f"{path}: not written: {reason}"
        if not os.path.isdir(self.folder) or error.errno in FORBIDDEN:
            line = f"packed weights are not kept: {self.folder}: {reason}"
        if line not in self._told:
            self._told.add(line)
            self.note(line)

    def _path(self, folder: Path, rank: int, world: int) -> Path:
        place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
        name = f"{folder.resolve().name}-{place}-{self.backend}-{rank}-of-{world}.packed"
        return self.folder / name

    def _origin(self, folder: Path, config: Any, rank: int, world: int) -> dict[str, Any]:
        """All that the content depends on; keys are words for the user."""
        index = folder / INDEX
        files = {path.name: path.stat() for path in (*shard_files(folder), folder / "config.json")}
        return {
            "format": FORMAT,
            "version": _version(),
            "backend": self.backend,
            "rank": f"{rank} of {world}",
            "configuration": repr(asdict(config)),
            **{name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
            "index": hashlib.sha256(index.read_bytes()).hexdigest() if index.exists() else None,
        }


class Recording:
    """Gives what a source gives, and stores what is kept of it; gives on if that fails."""

    def __init__(self, source: CheckpointSource, writer: Writer | None, packed: Packed) -> None:
        self.source, self.writer, self.packed = source, writer, packed
        self.place = source.place

    def stored(self, field: str) -> Any:
        tensor = self.source.stored(field)
        self._try(lambda writer: writer.add(field, tensor))
        return tensor

    def dense(self, field: str) -> Any:
        return self.place(self.stored(field), field)

    def int4(self, field: str) -> Any:
        tensor = self.source.matrix(field)
        placed = self.place(tensor, field)
        self._try(lambda writer: writer.add(field, self.packed.keep(tensor, placed)))
        return placed

    def finish(self) -> None:
        self.source.finish()
        self._try(lambda writer: writer.finish())
        self.writer = None

    def close(self) -> None:
        """An unfinished file disappears."""
        if self.writer is not None:
            self.writer.abandon()
        self.source.close()

    def _try(self, call: Callable[[Writer], None]) -> None:
        if self.writer is None:
            return
        try:
            call(self.writer)
        except OSError as error:
            self.packed._not_written(self.writer.path, error)
            self.writer.abandon()
            self.writer = None


def asked(build: Build) -> list[str]:
    """The fields of the weights in their order, an INT4 matrix as one."""
    order = Order()
    build(order)
    parts = ".shape", ".scale"
    return [name.removesuffix(".packed") for name in order.fields if not name.endswith(parts)]


def difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first key that two origins do not share with equal values."""
    for key in {**other, **one}:
        if key not in one or key not in other or one[key] != other[key]:
            return key
    return None


def _version() -> str:
    try:
        return metadata.version("ddtree-numba")
    except metadata.PackageNotFoundError:
        return "source checkout"
