"""A tiny random checkpoint with every feature of the published one, and its drafter.

Names and shapes are written out here once more, from the published lists and not from
model/names.py, so that a wrong table cannot agree with itself. All cut dimensions divide by 8
ranks.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from golden.checkpoint_writer import write_checkpoint, write_drafter, write_safetensors

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
}
TEXT = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "attention_bias": False,
    "intermediate_size": 48,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 512,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 112,
    "eos_token_id": 114,
    "pad_token_id": 127,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
    "quantization_config": QUANTIZATION,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "hidden_act": "silu",
    "vocab_size": 128,
    "block_size": 8,
    "num_target_layers": 3,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 126},
}


def nested_config() -> dict[str, Any]:
    """config.json in K2.6's form: everything about the text model, quantization too, nested."""
    return deepcopy(
        {
            "model_type": "kimi_k25",
            "architectures": ["KimiK25ForConditionalGeneration"],
            "dtype": "bfloat16",
            "bos_token_id": 112,
            "eos_token_id": 114,
            "pad_token_id": 127,
            "text_config": TEXT,
            "vision_config": {"num_hidden_layers": 2},
        }
    )


def flat_config() -> dict[str, Any]:
    """config.json in K2-Thinking's form."""
    return deepcopy(TEXT)


def drafter_config() -> dict[str, Any]:
    return deepcopy(DRAFTER)


def shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published names without prefix, experts dense, and their shapes."""
    hidden, heads, inter = text["hidden_size"], text["num_attention_heads"], "intermediate_size"
    nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    q_lora, kv_lora, v = text["q_lora_rank"], text["kv_lora_rank"], text["v_head_dim"]
    found = {
        "model.embed_tokens.weight": (text["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (text["vocab_size"], hidden),
    }
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        found |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            attention + "q_a_proj.weight": (q_lora, hidden),
            attention + "q_a_layernorm.weight": (q_lora,),
            attention + "q_b_proj.weight": (heads * (nope + rope), q_lora),
            attention + "kv_a_proj_with_mqa.weight": (kv_lora + rope, hidden),
            attention + "kv_a_layernorm.weight": (kv_lora,),
            attention + "kv_b_proj.weight": (heads * (nope + v), kv_lora),
            attention + "o_proj.weight": (hidden, heads * v),
        }
        if layer < text["first_k_dense_replace"]:
            found |= _mlp(prefix + "mlp.", hidden, text[inter])
            continue
        experts, size = text["n_routed_experts"], text["moe_" + inter]
        found[prefix + "mlp.gate.weight"] = (experts, hidden)
        found[prefix + "mlp.gate.e_score_correction_bias"] = (experts,)
        found |= _mlp(prefix + "mlp.shared_experts.", hidden, size)
        for expert in range(experts):
            found |= _mlp(f"{prefix}mlp.experts.{expert}.", hidden, size)
    return found


def drafter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, d = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    taps = len(config["dflash_config"]["target_layer_ids"])
    found = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        attention = prefix + "self_attn."
        found |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            attention + "q_proj.weight": (q, hidden),
            attention + "k_proj.weight": (kv, hidden),
            attention + "v_proj.weight": (kv, hidden),
            attention + "o_proj.weight": (hidden, q),
            attention + "q_norm.weight": (d,),
            attention + "k_norm.weight": (d,),
        }
        found |= _mlp(prefix + "mlp.", hidden, config["intermediate_size"])
    return found


def _mlp(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    up = {f"{prefix}{name}_proj.weight": (size, hidden) for name in ("gate", "up")}
    return up | {f"{prefix}down_proj.weight": (hidden, size)}


def random_tensors(
    shapes: dict[str, tuple[int, ...]], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Matrices of deviation 0.08, norms in 0.5..1.5, a correction bias that does something."""
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("e_score_correction_bias"):
            values = rng.uniform(-0.2, 0.2, shape)
        elif len(shape) == 1:
            values = rng.uniform(0.5, 1.5, shape)
        else:
            values = 0.08 * rng.standard_normal(shape)
        tensors[name] = values.astype(np.float32)
    return tensors


def write_tiny(
    folder: Path,
    rng: np.random.Generator,
    config: dict[str, Any] | None = None,
    shards: int = 3,
    prefix: str = "language_model.",
) -> dict[str, np.ndarray]:
    """A tiny target with its drafter in `folder`/drafter; returns the target's dense tensors."""
    config = config or nested_config()
    tensors = random_tensors(shapes(config.get("text_config", config)), rng)
    write_checkpoint(folder, config, tensors, shards, prefix)
    draft = drafter_config()
    write_drafter(folder / "drafter", draft, random_tensors(drafter_shapes(draft), rng))
    return tensors


def edit_tensors(path: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the tensors of one file; where an index lists them, it follows."""
    tensors = dict(load_file(path))
    edit(tensors)
    write_safetensors(path, tensors)
    index = path.parent / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        others = {k: v for k, v in content["weight_map"].items() if v != path.name}
        content["weight_map"] = others | dict.fromkeys(tensors, path.name)
        index.write_text(json.dumps(content))


def shard_of(folder: Path, name: str) -> Path:
    """The file that holds a tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]
