"""One tensor-parallel rank of any config with random weights, made where the operations read them.

What runs is the product: its table of names and cuts, its placing of experts as records, Target,
Drafter, Rank. Nothing is held on the host but a block of 2**22 numbers for each spread of values,
which tensors repeat, each from where the last one ended.

| field      | values                                                                      |
|------------|-----------------------------------------------------------------------------|
| matrices   | normal, of variance 1 / columns, so that rows of length 1 keep it           |
| embedding  | normal                                                                      |
| experts    | every nibble as likely; scales so that weights have variance 1 / columns    |
| norms      | 1                                                                           |
| correction | of the routers: 0; experts are drawn (`step_routing.py`)                     |
| cache      | normal, as normed latents are                                               |
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_numba.model.cache import PAGE, Cache, pages_for
from ddtree_numba.model.comm import SingleRank
from ddtree_numba.model.config import (
    DrafterConfig,
    ModelConfig,
    check_pair,
    load_config,
    load_drafter_config,
)
from ddtree_numba.model.drafter import Drafter
from ddtree_numba.model.loader import drafter_weights, target_weights
from ddtree_numba.model.names import Piece, drafter_pieces, fused_shape, target_pieces
from ddtree_numba.model.rank import Rank, Ranks
from ddtree_numba.model.sharding import check_tp
from ddtree_numba.model.target import Target
from ddtree_numba.spec.numerics import BF16, F32, PER_WORD, Int4Matrix
from golden import k26

BLOCK = (1 << 22) - 3  # numbers; shares no factor with a row, so that rows differ
NIBBLE_RMS = sqrt(sum(q * q for q in range(-8, 8)) / 16)
SPARE = PAGE  # positions behind context and tree


class OneOf(SingleRank):
    """Rank 0 of so many, whose sums and gathers end with it."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world

    def all_gather(self, part: Any) -> Any:
        return repeated(part, self.world)

    def gather(self, x: Any, joined: bool = False) -> Any:
        """Of this rank alone; a copy, as it may be part of a workspace."""
        return x if joined else x[None].copy()


def repeated(part: Any, times: int) -> Any:
    """In place of the parts of ranks that are not there: the last axis over and over."""
    if times == 1:
        return part
    bits = part.view(np.uint16)  # CuPy knows no bfloat16
    copies = np.broadcast_to(bits[..., None, :], (*bits.shape[:-1], times, bits.shape[-1]))
    return copies.reshape(*bits.shape[:-1], -1).view(part.dtype)


class Block:
    """Numbers that arrays are filled with, over and over."""

    def __init__(self, xp: Any, numbers: np.ndarray) -> None:
        self.xp, self.dtype = xp, numbers.dtype
        self.bits = xp.asarray(numbers.view(f"u{numbers.itemsize}"))
        self.at = 0

    def fill(self, out: Any) -> Any:
        """Into a contiguous array of the block's dtype; returns it."""
        flat, bits = out.view(self.bits.dtype).reshape(-1), self.bits
        size, length = flat.size, len(bits)
        first = min(size, length - self.at)
        flat[:first] = bits[self.at : self.at + first]
        times = (size - first) // length
        rest = first + times * length
        flat[first:rest].reshape(times, length)[...] = bits
        flat[rest:] = bits[: size - rest]
        self.at = (self.at + size) % length
        return out

    def array(self, shape: tuple[int, ...]) -> Any:
        return self.fill(self.xp.empty(shape, self.bits.dtype).view(self.dtype))


class RandomWeights:
    """A `loader.Source` of one rank's fields."""

    def __init__(self, pieces: Iterable[Piece], world: int, ops: Any) -> None:
        self.fields: dict[str, list[Piece]] = {}
        for piece in pieces:
            self.fields.setdefault(piece.field, []).append(piece)
        self.world, self.ops = world, ops
        self.place = ops.place
        self.rng = np.random.default_rng(20260612)
        self.blocks: dict[tuple, Block] = {}

    def shape(self, field: str) -> tuple[int, ...]:
        """(experts, rows, ...): its tensors one below the other, experts stacked."""
        return fused_shape(self.fields[field], self.world)

    def stored(self, field: str) -> np.ndarray:
        """On the host: one matrix."""
        shape = self.shape(field)[1:]
        size = 1 / sqrt(shape[1])
        key, draw = ("stored", size), lambda rng: rng.standard_normal(BLOCK, F32) * size
        return self._block(key, draw, xp=np).array(shape)

    def dense(self, field: str) -> Any:
        shape = self.shape(field)[1:]
        if field.endswith("bias"):
            return self.place(np.zeros(shape, F32), field)
        if len(shape) == 1:
            return self.place(np.ones(shape, BF16), field)
        with self.ops.active():
            size = 1.0 if field == "embed" else 1 / sqrt(shape[1])
            return self.place(self.normal(size).array(shape), field)

    def int4(self, field: str) -> Any:
        packed, scale = self.shape(f"{field}.packed"), self.shape(f"{field}.scale")
        columns = packed[2] * PER_WORD
        with self.ops.active():
            words, scales = self.words().array(packed), self.scales(columns).array(scale)
            return self.place(Int4Matrix(words, scales, (packed[1], columns)), field)

    def normal(self, size: float) -> Block:
        return self._block(("normal", size), lambda rng: rng.standard_normal(BLOCK, F32) * size)

    def scales(self, columns: int) -> Block:
        """Within a factor of three of each other."""
        size = 1 / (NIBBLE_RMS * sqrt(columns))
        return self._block(("scales", columns), lambda rng: rng.uniform(0.5, 1.5, BLOCK) * size)

    def words(self) -> Block:
        ends = np.iinfo(np.int32)
        return self._block(
            ("words",), lambda rng: rng.integers(ends.min, ends.max, BLOCK, np.int32), np.int32
        )

    def _block(self, key: tuple, draw: Callable, dtype: Any = BF16, xp: Any = None) -> Block:
        if key not in self.blocks:
            self.blocks[key] = Block(xp or self.ops.xp, draw(self.rng).astype(dtype))
        return self.blocks[key]


def read_configs(
    folder: Path | None, tp: int, layers: int | None
) -> tuple[ModelConfig, DrafterConfig]:
    """The configs of a folder and of its subfolder `drafter`, or K2.6's; the first `layers` alone.

    Token ids that the bench feeds in lie in rank 0's share of the vocabulary: so does the mask.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            for name, config in ((".", k26.config()), ("drafter", k26.drafter_config())):
                (Path(made) / name).mkdir(exist_ok=True)
                (Path(made) / name / "config.json").write_text(json.dumps(config))
            return read_configs(Path(made), tp, layers)
    config, drafter = load_config(folder), load_drafter_config(folder / "drafter")
    check_pair(config, drafter, folder, folder / "drafter")
    check_tp(config, tp, drafter)
    if layers is not None and layers < config.num_hidden_layers:
        dense = min(config.first_k_dense_replace, layers)
        config = replace(config, num_hidden_layers=layers, first_k_dense_replace=dense)
        taps = sorted({min(tap, layers - 1) for tap in drafter.target_layer_ids})
        drafter = replace(drafter, target_layer_ids=tuple(taps))
    return config, replace(drafter, mask_token_id=config.vocab_size // tp - 1)


def build(
    ops: Any,
    config: ModelConfig,
    drafter: DrafterConfig,
    tp: int,
    positions: int,
    nodes: int,
) -> tuple[Ranks, np.ndarray]:
    """Rank 0 of tp, and the pages [1,M] of a request of so many positions, which hold rows.

    Pages lie in no order. Rope tables and cache reach `SPARE` positions beyond context and tree.
    """
    weights = RandomWeights(target_pieces(config), tp, ops)
    target = target_weights(weights, config)
    draft_source = RandomWeights(drafter_pieces(drafter), tp, ops)
    draft_source.blocks = weights.blocks
    draft = drafter_weights(draft_source, drafter)
    ops.placed_all()
    last = positions + nodes + SPARE
    pages = pages_for(last)
    cache = Cache(config, drafter, tp, pages, nodes, ops.zeros)
    with ops.active():
        for rows in (cache.pages, cache.draft_pages):
            weights.normal(1.0).fill(rows)
    ops.reserve(last)
    comm = OneOf(tp)
    models = Target(config, target, ops, comm), Drafter(drafter, draft, ops, comm)
    table = np.random.default_rng(1).permutation(pages).astype(np.int32)
    return Ranks([Rank(*models, cache, ops)], None), table[None]
