"""A folder of packed weights under test."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree_numba.model.backend import NumpyBackend
from ddtree_numba.model.config import load_config
from ddtree_numba.model.loader import load_target
from ddtree_numba.model.packed import Packed
from ddtree_numba.model.reading import Files
from tests.leaves import leaves, same


class Kept:
    """A folder of packed weights, what it said, and what was read since."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        ops = NumpyBackend()
        self.packed = Packed(folder, ops.name, ops.keep, self.notes.append)
        self.read: list[tuple[str, int]] = []
        original = Files.read

        def counting(files: Files, path: Path, start: int, out: np.ndarray) -> None:
            self.read.append((path.suffix, out.nbytes))
            original(files, path, start, out)

        monkeypatch.setattr(Files, "read", counting)

    @property
    def files(self) -> list[Path]:
        return sorted(self.packed.folder.iterdir())

    def load(self, folder: Path, rank: int = 0, world: int = 1, **options: Any) -> Any:
        self.notes.clear()
        self.read.clear()
        config = load_config(folder)
        return load_target(folder, config, rank, world, packed=self.packed, **options)

    def bytes(self, suffix: str) -> int:
        return sum(size for kind, size in self.read if kind == suffix)

    def calls(self, suffix: str) -> int:
        return sum(kind == suffix for kind, _ in self.read)


def equal(one: Any, other: Any) -> bool:
    return all(map(same, leaves(one), leaves(other)))
