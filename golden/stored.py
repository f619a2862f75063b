"""The published files back into the PyTorch models: what is measured is what was written."""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from shapes import DRAFT_SHAPE, TARGET_SHAPE
from torch_drafter import Drafter
from torch_target import Moe, Target

from ddtree_numba.spec.numerics import dequantize_int4, widen


def load_target(folder: Path, device: str) -> Target:
    files = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        files |= {
            name.removeprefix("language_model.").removeprefix("model."): t
            for name, t in load_file(path).items()
        }
    model = Target(TARGET_SHAPE)
    state = {n: _tensor(t) for n, t in files.items() if ".experts." not in n}
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mlp, Moe):
            layer.mlp.quantize = False
            start = f"layers.{i}.mlp."
            gate, up, down = (
                _experts(files, start, f"{name}_proj") for name in ("gate", "up", "down")
            )
            state[f"{start}gate_up"] = torch.cat((gate, up), dim=1)
            state[f"{start}down"] = down
    model.load_state_dict(state)
    return model.requires_grad_(False).eval().to(device)


def load_drafter(folder: Path, device: str) -> Drafter:
    model = Drafter(DRAFT_SHAPE)
    model.load_state_dict(
        {n: _tensor(t) for n, t in load_file(folder / "model.safetensors").items()}
    )
    return model.requires_grad_(False).eval().to(device)


def _experts(files: dict[str, np.ndarray], start: str, name: str) -> torch.Tensor:
    stack = []
    for expert in range(TARGET_SHAPE.n_routed_experts):
        packed, scale, shape = (
            files[f"{start}experts.{expert}.{name}.weight_{x}"]
            for x in ("packed", "scale", "shape")
        )
        stack.append(_tensor(dequantize_int4(packed, scale, tuple(shape))))
    return torch.stack(stack)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(widen(array)))
