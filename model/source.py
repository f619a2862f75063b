"""This rank's fields from the files of a checkpoint, in the order in which weights ask for them.

Only this rank's slices are copied, straight into the fused tensor that the forward pass uses, which
`place` then takes over.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ddtree_numba.model.checkpoint import DTYPES
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.model.manifest import Manifest
from ddtree_numba.model.names import Piece, fused_shape
from ddtree_numba.model.reading import Ahead, Task, grouped, read_group
from ddtree_numba.spec.numerics import Int4Matrix

Place = Callable[[Any, str], Any]
Progress = Callable[[int, int], None]
Build = Callable[[Any], Any]  # from a Source, or one like it, to weights


class Order:
    """Stands for a source, to learn in which order `build` asks for fields."""

    place: Place = staticmethod(lambda tensor, field: None)

    def __init__(self) -> None:
        self.fields: list[str] = []

    def stored(self, field: str) -> np.ndarray:
        self.fields.append(field)
        return np.empty(0)

    def dense(self, field: str) -> None:
        self.fields.append(field)

    def int4(self, field: str) -> None:
        self.fields += [f"{field}.{part}" for part in ("shape", "packed", "scale")]


class CheckpointSource:
    """Reads the fields of a manifest, each once."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        world: int,
        build: Build,
        place: Place,
        progress: Progress | None,
    ):
        self.checkpoint, self.fields = manifest.checkpoint, manifest.fields
        self.rank, self.world, self.place = rank, world, place
        order = Order()
        build(order)
        sizes = {field: self._bytes(field) for field in order.fields}
        if sizes.keys() != self.fields.keys():
            raise AssertionError(f"fields amiss: {sorted(sizes.keys() ^ self.fields.keys())[:4]}")
        self.total = sum(sizes.values())
        self._ahead = Ahead(sizes, self._begin, progress)
        self.finish = self._ahead.finish

    def close(self) -> None:
        self._ahead.close()
        self.checkpoint.shards.close()

    def stored(self, field: str) -> np.ndarray:
        """The rank's slices of one field: fused along rows in slot order, experts stacked."""
        return self._ahead.take(field)

    def dense(self, field: str) -> Any:
        return self.place(self.stored(field), field)

    def int4(self, field: str) -> Any:
        return self.place(self.matrix(field), field)

    def matrix(self, field: str) -> Int4Matrix:
        """All experts' matrix `field`, after checking each weight_shape against config.json."""
        self._check_shapes(field, self._ahead.take(f"{field}.shape"))
        packed, scale = self.stored(f"{field}.packed"), self.stored(f"{field}.scale")
        shape = (packed.shape[1], packed.shape[2] * 8)
        return Int4Matrix(packed, scale, shape)

    def _bytes(self, field: str) -> int:
        parts = self.fields.get(field, ())
        if field.endswith(".shape"):  # of either dtype
            return sum(entry.stop - entry.start for _, entry in parts)
        return sum(piece.local_bytes(self.world) for piece, _ in parts)

    def _begin(self, field: str) -> tuple[Any, list[Task]]:
        """(what `take` gives, the tasks that fill it)."""
        parts = self.fields[field]
        out: Any
        if field.endswith(".shape"):
            targets = out = [np.empty(2, DTYPES[entry.dtype]) for _, entry in parts]
        else:
            out, targets = self._stacked([piece for piece, _ in parts])
        reads = [
            self.checkpoint.part(entry, target, *piece.local_slices(self.rank, self.world))
            for (piece, entry), target in zip(parts, targets, strict=True)
        ]
        shards = self.checkpoint.shards
        return out, [partial(read_group, shards, group) for group in grouped(reads)]

    def _stacked(self, pieces: list[Piece]) -> tuple[np.ndarray, list[np.ndarray]]:
        """(tensor [experts, rows of all slots, ...], its part for each piece)."""
        shape = fused_shape(pieces, self.world)
        out = np.empty(shape, DTYPES[pieces[0].dtype])
        slots = [piece for piece in pieces if piece.expert == 0]
        rows = [piece.local_shape(self.world)[0] for piece in slots]
        starts = dict(zip((piece.slot for piece in slots), np.cumsum([0, *rows]), strict=False))
        sizes = dict(zip((piece.slot for piece in slots), rows, strict=True))
        targets = [
            out[piece.expert, starts[piece.slot] : starts[piece.slot] + sizes[piece.slot]]
            for piece in pieces
        ]
        stacked = pieces[0].name.endswith((".weight_packed", ".weight_scale"))
        return out if stacked else out[0], targets

    def _check_shapes(self, field: str, shapes: list[np.ndarray]) -> None:
        full = {piece.slot: piece.shape for piece, _ in self.fields[f"{field}.packed"]}
        for (piece, entry), shape in zip(self.fields[f"{field}.shape"], shapes, strict=True):
            rows, words = full[piece.slot]
            if tuple(shape) != (rows, words * 8):
                raise CheckpointError(
                    f"{entry.path}: tensor {piece.name} holds {shape.tolist()}, "
                    f"config.json implies {[rows, words * 8]}"
                )
