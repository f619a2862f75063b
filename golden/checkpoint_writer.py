"""Writes a checkpoint folder in the published layout from dense tensors.

Routed experts are quantized to INT4 in groups of 32; the rest becomes bfloat16, the router's
correction bias float32. Tensors are asked for shard by shard, so `tensors` may compute them on
demand.
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_numba.spec.numerics import bf16, pack_int4, quantize_int4

DTYPES = {"bfloat16": "BF16", "float32": "F32", "int32": "I32", "int64": "I64"}
EXPERT = re.compile(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")
BIAS = "e_score_correction_bias"


def write_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    shards: int = 3,
    prefix: str = "language_model.",
) -> None:
    """config.json, `shards` safetensors files and their index.

    tensors: published names without prefix, experts as plain `...experts.E.gate_proj.weight`; a
    layer
        lies wholly in one shard, and embedding, last norm and head in the last.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(_shares(tensors, shards), start=1):
        file = f"model-{number:05d}-of-{shards:06d}.safetensors"
        stored: dict[str, np.ndarray] = {}
        for name in names:
            stored |= stored_form(prefix + name, tensors[name])
        write_safetensors(folder / file, stored)
        weight_map |= dict.fromkeys(stored, file)
        total += sum(value.nbytes for value in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def write_drafter(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """config.json and model.safetensors of a drafter, all bfloat16."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", {k: bf16(v) for k, v in tensors.items()})


def stored_form(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """A dense tensor as the files hold it: one tensor, or packed words, scales and shape."""
    if EXPERT.fullmatch(name):
        values, scale = quantize_int4(tensor)
        return {
            f"{name}_packed": pack_int4(values),
            f"{name}_scale": scale,
            f"{name}_shape": np.array(tensor.shape, np.int32),
        }
    return {name: np.asarray(tensor, np.float32) if name.endswith(BIAS) else bf16(tensor)}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file: header length, header padded to 8 bytes, the tensors back to back."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def _shares(names: Iterable[str], shards: int) -> list[list[str]]:
    """Names per shard: the layers in equal consecutive groups, everything else in the last."""
    layers: dict[str, int | None] = {}
    for name in names:
        match = re.match(r"model\.layers\.(\d+)\.", name)
        layers[name] = int(match[1]) if match else None
    count = 1 + max((layer for layer in layers.values() if layer is not None), default=0)
    shares: list[list[str]] = [[] for _ in range(shards)]
    for name, layer in layers.items():
        shares[shards - 1 if layer is None else layer * shards // count].append(name)
    return [sorted(share) for share in shares]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
