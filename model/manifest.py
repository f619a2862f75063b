"""The table of names against the headers of a checkpoint, before a tensor is read.

Every expected tensor must be there exactly once with the dtype and shape that config.json implies,
and nothing else may be: a typo in a name is an error, the vision tower is skipped and counted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ddtree_numba.model.checkpoint import Checkpoint, Entry
from ddtree_numba.model.config import ModelConfig
from ddtree_numba.model.drafter_config import DrafterConfig
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.model.names import Piece, drafter_pieces, target_pieces
from ddtree_numba.model.quantization import Quantization

PREFIX = "language_model."
SKIPPED = ("vision_tower.", "mm_projector.")
ROTARY = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


@dataclass(frozen=True)
class Manifest:
    """What to read, field by field; what was passed over."""

    checkpoint: Checkpoint
    fields: dict[str, list[tuple[Piece, Entry]]]
    skipped_tensors: int
    skipped_bytes: int


def target_manifest(checkpoint: Checkpoint, config: ModelConfig) -> Manifest:
    found = _normalise(checkpoint, lambda name: name.removeprefix(PREFIX))
    skipped = [found.pop(name) for name in list(found) if name.startswith(SKIPPED)]
    pieces = list(target_pieces(config))
    _check_packed(checkpoint, found, pieces, config.quantization)
    return _match(checkpoint, found, pieces, skipped)


def drafter_manifest(checkpoint: Checkpoint, config: DrafterConfig) -> Manifest:
    found = _normalise(checkpoint, lambda name: name.removeprefix("model."))
    skipped = [found.pop(name) for name in list(found) if name.endswith(ROTARY)]
    if "fc.weight" in found and len(found["fc.weight"][1].shape) == 2:
        entry, taps = found["fc.weight"][1], len(config.target_layer_ids)
        if entry.shape[1] != taps * config.hidden_size:
            built = entry.shape[1] / config.hidden_size
            raise CheckpointError(
                f"{entry.path}: fc.weight takes {entry.shape[1]} inputs, {built:g} taps of "
                f"{config.hidden_size}; target_layer_ids names {taps}"
            )
    return _match(checkpoint, found, list(drafter_pieces(config)), skipped)


Found = dict[str, tuple[str, Entry]]  # normalised name -> (stored name, entry)


def _normalise(checkpoint: Checkpoint, normal: Callable[[str], str]) -> Found:
    found: Found = {}
    for name, entry in checkpoint.tensors.items():
        if normal(name) in found:
            other = found[normal(name)][0]
            raise CheckpointError(f"{entry.path}: {name} and {other} are the same tensor")
        found[normal(name)] = (name, entry)
    return found


def _match(
    checkpoint: Checkpoint, found: Found, pieces: list[Piece], skipped: Iterable[tuple[str, Entry]]
) -> Manifest:
    fields: dict[str, list[tuple[Piece, Entry]]] = {}
    missing = [piece.name for piece in pieces if piece.name not in found]
    unknown = found.keys() - {piece.name for piece in pieces}
    if unknown:
        name, entry = found[min(unknown)]
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise CheckpointError(f"{entry.path}: unknown tensor {name}{more}")
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{checkpoint.folder}: no file has tensor {missing[0]}{more}")
    for piece in pieces:
        name, entry = found[piece.name]
        # The library writes weight_shape as int64, the published files have int32.
        dtypes = ("I32", "I64") if name.endswith(".weight_shape") else (piece.dtype,)
        if entry.dtype not in dtypes or entry.shape != piece.shape:
            raise CheckpointError(
                f"{entry.path}: tensor {name} is {entry.dtype} {list(entry.shape)}, "
                f"config.json implies {piece.dtype} {list(piece.shape)}"
            )
        fields.setdefault(piece.field, []).append((piece, entry))
    for parts in fields.values():
        parts.sort(key=lambda part: (part[0].expert, part[0].slot))
    entries = [entry for _, entry in skipped]
    passed = sum(entry.stop - entry.start for entry in entries)
    return Manifest(checkpoint, fields, len(entries), passed)


def _check_packed(
    checkpoint: Checkpoint, found: Found, pieces: list[Piece], quantization: Quantization | None
) -> None:
    """Do config.json and the tensors agree on which linear modules are packed?"""
    config = checkpoint.folder / "config.json"
    for piece in pieces:
        module, _, part = piece.name.rpartition(".")
        plain, packed = f"{module}.weight", f"{module}.weight_packed"
        if part == "weight_packed":
            if packed not in found and plain in found:
                name, entry = found[plain]
                raise CheckpointError(
                    f"{entry.path}: tensor {name}: routed experts stored as plain {entry.dtype} "
                    "cannot be loaded, only INT4 pack-quantized ones"
                )
            if packed in found:
                stored = found[packed][0].removesuffix(".weight_packed")
                if quantization is None or not quantization.covers(stored):
                    raise CheckpointError(
                        f"{config}: no quantization_config covers {stored}, which is stored packed"
                    )
        elif part == "weight" and ("_proj" in module or module == "lm_head"):
            if packed in found:
                name, entry = found[packed]
                raise CheckpointError(
                    f"{entry.path}: tensor {name}: only routed experts may be stored packed"
                )
            if plain in found and quantization is not None:
                stored = found[plain][0].removesuffix(".weight")
                if quantization.covers(stored):
                    raise CheckpointError(
                        f"{config}: quantization_config covers {stored}, which is stored plain"
                    )
