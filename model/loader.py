"""Checkpoint -> this rank's weights, tensor by tensor.

Beside what `place` keeps, host memory holds the tensor that it takes over and those being read
(the largest is the embedding or one layer's stacked experts).
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddtree_numba.model.checkpoint import Checkpoint
from ddtree_numba.model.config import ModelConfig
from ddtree_numba.model.drafter_config import DrafterConfig
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.model.manifest import Manifest, drafter_manifest, target_manifest
from ddtree_numba.model.packed import Packed
from ddtree_numba.model.sharding import check_shares, drafter_shares, target_shares
from ddtree_numba.model.source import Build, CheckpointSource, Place, Progress
from ddtree_numba.model.weights import (
    DenseMlp,
    DrafterWeights,
    DraftLayerWeights,
    LayerWeights,
    MoeMlp,
    TargetWeights,
)
from ddtree_numba.spec.numerics import F32, Int4Matrix


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
    packed: Packed | None = None,
) -> TargetWeights:
    """The target's weights of one rank.

    place(tensor, field) puts one numpy array or Int4Matrix, the weight of that name, where it
    lives; progress(done, total) counts this rank's bytes. `packed` is read instead, or written.
    Raises CheckpointError, one line, before any tensor is read if anything does not fit.
    """
    _check_rank(rank, world)
    check_shares(target_shares(config), world)
    build = partial(target_weights, config=config)
    return _load(target_manifest, build, Path(folder), config, rank, world, place, progress, packed)


def load_drafter(
    folder: str | Path,
    config: DrafterConfig,
    rank: int = 0,
    world: int = 1,
    place: Place = place_numpy,
    progress: Progress | None = None,
    packed: Packed | None = None,
) -> DrafterWeights:
    """The drafter's weights of one rank; arguments as for `load_target`."""
    _check_rank(rank, world)
    check_shares(drafter_shares(config), world)
    build = partial(drafter_weights, config=config)
    return _load(
        drafter_manifest, build, Path(folder), config, rank, world, place, progress, packed
    )


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


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < max(world, 1):
        raise CheckpointError(f"rank {rank} is not one of {world} ranks")


def _load(
    manifest: Callable[[Checkpoint, Any], Manifest],
    build: Build,
    folder: Path,
    config: Any,
    rank: int,
    world: int,
    place: Place,
    progress: Progress | None,
    packed: Packed | None,
) -> Any:
    if packed is not None:
        weights = packed.load(folder, config, rank, world, build, place, progress)
        if weights is not None:
            return weights
    found = manifest(Checkpoint(folder), config)
    source: Any = CheckpointSource(found, rank, world, build, place, progress)
    if packed is not None:
        source = packed.recording(source, folder, config, rank, world)
    with closing(source):
        weights = build(source)
        source.finish()
    return weights


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
