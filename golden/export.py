"""Trained weights to the published files: names, shards, INT4 experts, configuration."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from shapes import DRAFT, GENERATION, TOP
from torch_drafter import Drafter
from torch_target import Moe, Target

from ddtree_numba.spec.numerics import pack_int4, quantize_int4

PREFIX = "language_model."
FLOAT32 = "e_score_correction_bias"
Tensors = dict[str, np.ndarray]


def export_target(model: Target, folder: Path) -> None:
    """Shard L + 1 holds layer L, the last one the embedding, the final norm and the head."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = [_layer(model, i) for i in range(len(model.layers))]
    outer = {
        "model.embed_tokens": model.embed_tokens,
        "model.norm": model.norm,
        "lm_head": model.lm_head,
    }
    shards.append(
        {f"{PREFIX}{name}.weight": _bf16(module.weight) for name, module in outer.items()}
    )
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    index: dict[str, str] = {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    _json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )
    _json(folder / "config.json", TOP)
    _json(folder / "generation_config.json", GENERATION)


def _layer(model: Target, i: int) -> Tensors:
    layer, start = model.layers[i], f"{PREFIX}model.layers.{i}."
    state = {
        n: t for n, t in layer.state_dict().items() if not n.startswith(("mlp.gate_up", "mlp.down"))
    }
    if not isinstance(layer.mlp, Moe):
        state = layer.state_dict()
    tensors = {
        start + n: t.numpy(force=True) if n.endswith(FLOAT32) else _bf16(t)
        for n, t in state.items()
    }
    if isinstance(layer.mlp, Moe):
        gate, up = np.split(layer.mlp.gate_up.numpy(force=True), 2, axis=1)
        down = layer.mlp.down.numpy(force=True)
        for name, stack in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            for expert, weight in enumerate(stack):
                tensors |= _int4(f"{start}mlp.experts.{expert}.{name}", weight)
    return tensors


def _int4(name: str, weight: np.ndarray) -> Tensors:
    values, scale = quantize_int4(weight)
    shape = np.array(weight.shape, np.int32)
    return {
        f"{name}.weight_packed": pack_int4(values),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": shape,
    }


def export_drafter(model: Drafter, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _bf16(tensor) for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _json(folder / "config.json", DRAFT)


def _bf16(tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.float().numpy(force=True)).astype(ml_dtypes.bfloat16)


def _json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
