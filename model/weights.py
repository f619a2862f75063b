"""The tensors of one rank, as the forward passes use them; tp is the number of ranks.

h, hq, hkv are heads of this rank (all heads / tp); I is a full intermediate size. An array lives
where the loader's `place` put it: numpy arrays on the numpy backend, device arrays on the GPU.
"""

from dataclasses import dataclass
from typing import Any

from ddtree_numba.spec.numerics import Int4Matrix

Array = Any  # numpy.ndarray or cupy.ndarray


@dataclass(frozen=True)
class DenseMlp:
    gate_up: Array  # [2I/tp, H] gate rows, then up rows
    down: Array  # [H, I/tp]


@dataclass(frozen=True)
class MoeMlp:
    gate: Array  # [E, H]
    bias: Array  # [E] float32, for the selection only
    gate_up: Int4Matrix  # E x [2I/tp, H]
    down: Int4Matrix  # E x [H, I/tp]
    shared: DenseMlp


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Array  # [H]
    qkv_a: Array  # [q_lora + kv_lora + rope, H]
    q_a_norm: Array  # [q_lora]
    q_b: Array  # [h * (nope + rope), q_lora]
    kv_a_norm: Array  # [kv_lora]
    w_uk: Array  # [h, nope, kv_lora]
    w_uv: Array  # [h, kv_lora, v]
    o: Array  # [H, h * v]
    post_norm: Array  # [H]
    mlp: DenseMlp | MoeMlp


@dataclass(frozen=True)
class TargetWeights:
    embed: Array  # [V/tp, H]
    layers: tuple[LayerWeights, ...]
    norm: Array  # [H]
    lm_head: Array  # [V/tp, H]


@dataclass(frozen=True)
class DraftLayerWeights:
    input_norm: Array  # [H]
    qkv: Array  # [(hq + 2 hkv) * d, H]
    q_norm: Array  # [d]
    k_norm: Array  # [d]
    o: Array  # [H, hq * d]
    post_norm: Array  # [H]
    mlp: DenseMlp


@dataclass(frozen=True)
class DrafterWeights:
    fc: Array  # [H / W, K * H] for K taps
    hidden_norm: Array  # [H]
    norm: Array  # [H]
    layers: tuple[DraftLayerWeights, ...]
