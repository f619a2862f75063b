"""Checkpoint -> this rank's weights, tensor by tensor.

Only this rank's slices are copied out of the memory-mapped files, straight into the fused tensor
that the forward pass uses, which `place` then takes over. Host memory holds one such tensor at a
time (the largest is the embedding or one layer's stacked experts) beside what `place` keeps.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddtree_numba.model.checkpoint import DTYPES, Checkpoint
from ddtree_numba.model.config import ModelConfig
from ddtree_numba.model.drafter_config import DrafterConfig
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.model.manifest import Manifest, drafter_manifest, target_manifest
from ddtree_numba.model.names import Piece
from ddtree_numba.model.sharding import check_shares, drafter_shares, target_shares
from ddtree_numba.model.weights import (
    DenseMlp,
    DrafterWeights,
    DraftLayerWeights,
    LayerWeights,
    MoeMlp,
    TargetWeights,
)
from ddtree_numba.spec.numerics import F32, Int4Matrix

Place = Callable[[Any, str], Any]
Progress = Callable[[int, int], None]


def place_numpy(tensor: np.ndarray | Int4Matrix, field: str = "") -> Any:
    """Where the numpy backend keeps a tensor: widened to float32 once, which is exact.

    Matrices are stored column by column, as the row-by-row products read their transpose; stacks of
    matrices and vectors in row order; INT4 stays packed.
    """
    if isinstance(tensor, Int4Matrix):
        return tensor
    placed = np.empty(tensor.shape, F32, order="F" if tensor.ndim == 2 else "C")
    placed[...] = tensor
    return placed


def load_target(
    folder: str | Path,
    config: ModelConfig,
    rank: int = 0,
    world: int = 1,
    place: Place = place_numpy,
    progress: Progress | None = None,
) -> TargetWeights:
    """The target's weights of one rank.

    place(tensor, field) puts one numpy array or Int4Matrix, the weight of that name, where it
    lives; progress(done, total) counts this rank's bytes. Raises CheckpointError, one line, before
    any tensor is read if anything does not fit.
    """
    _check_rank(rank, world)
    check_shares(target_shares(config), world)
    manifest = target_manifest(Checkpoint(folder), config)
    reader = _Reader(manifest, rank, world, place, progress)
    weights = target_weights(reader, config)
    reader.finish()
    return weights


def load_drafter(
    folder: str | Path,
    config: DrafterConfig,
    rank: int = 0,
    world: int = 1,
    place: Place = place_numpy,
    progress: Progress | None = None,
) -> DrafterWeights:
    """The drafter's weights of one rank; arguments as for `load_target`."""
    _check_rank(rank, world)
    check_shares(drafter_shares(config), world)
    manifest = drafter_manifest(Checkpoint(folder), config)
    reader = _Reader(manifest, rank, world, place, progress)
    weights = drafter_weights(reader, config)
    reader.finish()
    return weights


class Source(Protocol):
    """Where a rank's fields come from, each asked for once."""

    place: Place

    def stored(self, field: str) -> np.ndarray:
        """As a checkpoint stores it, in host memory."""

    def dense(self, field: str) -> Any:
        """Placed."""

    def int4(self, field: str) -> Any:
        """All experts, placed."""


def target_weights(source: Source, config: ModelConfig) -> TargetWeights:
    return TargetWeights(
        embed=source.dense("embed"),
        layers=tuple(_layer(source, config, i) for i in range(config.num_hidden_layers)),
        norm=source.dense("norm"),
        lm_head=source.dense("lm_head"),
    )


def drafter_weights(source: Source, config: DrafterConfig) -> DrafterWeights:
    return DrafterWeights(
        fc=source.dense("fc"),
        hidden_norm=source.dense("hidden_norm"),
        norm=source.dense("norm"),
        layers=tuple(_draft_layer(source, i) for i in range(config.num_hidden_layers)),
    )


def fused_shape(pieces: Iterable[Piece], world: int) -> tuple[int, ...]:
    """(experts, rows, ...) of a rank's field: its pieces along the rows, experts stacked."""
    pieces = list(pieces)
    slots = [piece.local_shape(world) for piece in pieces if piece.expert == 0]
    return len(pieces) // len(slots), sum(shape[0] for shape in slots), *slots[0][1:]


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < max(world, 1):
        raise CheckpointError(f"rank {rank} is not one of {world} ranks")


class _Reader:
    """Reads the fields of a manifest, each once."""

    def __init__(
        self, manifest: Manifest, rank: int, world: int, place: Place, progress: Progress | None
    ):
        self.checkpoint = manifest.checkpoint
        self.left = dict(manifest.fields)
        self.rank, self.world = rank, world
        self.place, self.progress = place, progress
        self.done = 0
        parts = (piece for field in self.left.values() for piece, _ in field)
        self.total = sum(piece.local_bytes(world) for piece in parts)

    def stored(self, field: str) -> np.ndarray:
        """The rank's slices of one field: fused along rows in slot order, experts stacked."""
        parts = self.left.pop(field)
        slots = [piece for piece, _ in parts if piece.expert == 0]
        rows = [piece.local_shape(self.world)[0] for piece in slots]
        shape = fused_shape((piece for piece, _ in parts), self.world)
        out = np.empty(shape, DTYPES[slots[0].dtype])
        starts = dict(zip((piece.slot for piece in slots), np.cumsum([0, *rows]), strict=False))
        for piece, entry in parts:
            start = starts[piece.slot]
            target = out[piece.expert, start : start + piece.local_shape(self.world)[0]]
            self.checkpoint.read(entry, target, *piece.local_slices(self.rank, self.world))
            self._advance(piece.local_bytes(self.world))
        return out if ".packed" in field or ".scale" in field else out[0]

    def dense(self, field: str) -> Any:
        return self.place(self.stored(field), field)

    def int4(self, field: str) -> Any:
        """All experts' matrix `field`, after checking each weight_shape against config.json."""
        self._check_shapes(field)
        packed, scale = self.stored(f"{field}.packed"), self.stored(f"{field}.scale")
        shape = (packed.shape[1], packed.shape[2] * 8)
        return self.place(Int4Matrix(packed, scale, shape), field)

    def _check_shapes(self, field: str) -> None:
        full = {piece.slot: piece.shape for piece, _ in self.left[f"{field}.packed"]}
        for piece, entry in self.left.pop(f"{field}.shape"):
            shape = np.empty(2, DTYPES[entry.dtype])
            self.checkpoint.read(entry, shape, slice(None), slice(None))
            self._advance(piece.local_bytes(self.world))
            rows, words = full[piece.slot]
            if tuple(shape) != (rows, words * 8):
                raise CheckpointError(
                    f"{entry.path}: tensor {piece.name} holds {shape.tolist()}, "
                    f"config.json implies {[rows, words * 8]}"
                )

    def _advance(self, size: int) -> None:
        self.done += size
        if self.progress is not None:
            self.progress(self.done, self.total)

    def finish(self) -> None:
        """Every field was asked for, so every tensor was read exactly once."""
        if self.left:
            raise AssertionError(f"fields that no weight asked for: {sorted(self.left)[:4]}")


def _layer(source: Source, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"layers.{layer}."
    w_uk, w_uv = _split_heads(source.stored(f"{prefix}kv_b"), config)
    dense = layer < config.first_k_dense_replace
    return LayerWeights(
        input_norm=source.dense(f"{prefix}input_norm"),
        qkv_a=source.dense(f"{prefix}qkv_a"),
        q_a_norm=source.dense(f"{prefix}q_a_norm"),
        q_b=source.dense(f"{prefix}q_b"),
        kv_a_norm=source.dense(f"{prefix}kv_a_norm"),
        w_uk=source.place(w_uk, f"{prefix}w_uk"),
        w_uv=source.place(w_uv, f"{prefix}w_uv"),
        o=source.dense(f"{prefix}o"),
        post_norm=source.dense(f"{prefix}post_norm"),
        mlp=_dense_mlp(source, f"{prefix}mlp.") if dense else _moe_mlp(source, f"{prefix}mlp."),
    )


def _split_heads(kv_b: np.ndarray, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """kv_b[h * (nope + v), kv_lora] -> w_uk[h, nope, kv_lora], w_uv[h, kv_lora, v]."""
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    heads = kv_b.reshape(-1, nope + value, config.kv_lora_rank)
    w_uk, w_uv = heads[:, :nope], heads[:, nope:].transpose(0, 2, 1)
    return np.ascontiguousarray(w_uk), np.ascontiguousarray(w_uv)


def _dense_mlp(source: Source, prefix: str) -> DenseMlp:
    return DenseMlp(gate_up=source.dense(f"{prefix}gate_up"), down=source.dense(f"{prefix}down"))


def _moe_mlp(source: Source, prefix: str) -> MoeMlp:
    return MoeMlp(
        gate=source.dense(f"{prefix}gate"),
        bias=source.dense(f"{prefix}bias"),
        gate_up=source.int4(f"{prefix}gate_up"),
        down=source.int4(f"{prefix}down"),
        shared=_dense_mlp(source, f"{prefix}shared."),
    )


def _draft_layer(source: Source, layer: int) -> DraftLayerWeights:
    prefix = f"layers.{layer}."
    return DraftLayerWeights(
        input_norm=source.dense(f"{prefix}input_norm"),
        qkv=source.dense(f"{prefix}qkv"),
        q_norm=source.dense(f"{prefix}q_norm"),
        k_norm=source.dense(f"{prefix}k_norm"),
        o=source.dense(f"{prefix}o"),
        post_norm=source.dense(f"{prefix}post_norm"),
        mlp=_dense_mlp(source, f"{prefix}mlp."),
    )
