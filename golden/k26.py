"""The published config.json of Kimi K2.6, as far as a text model reads it, and of its drafter."""

from copy import deepcopy
from typing import Any

from golden.shapes import DRAFT, TEXT, TOP

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
TOKENS = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
SIZES = {
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
DRAFT_SIZES = {
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    "head_dim": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "layer_types": ["full_attention"] * 6,
    "max_position_embeddings": 262144,
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_target_layers": 61,
    "rope_parameters": YARN | {"rope_theta": 50000.0, "rope_type": "deepseek_yarn"},
    "vocab_size": 163840,
}


def config() -> dict[str, Any]:
    text = TEXT | SIZES | TOKENS | {"rope_scaling": YARN | {"type": "yarn"}}
    top = TOP | TOKENS | {"media_placeholder_token_id": 163605, "text_config": text}
    return deepcopy(top)


def drafter_config() -> dict[str, Any]:
    drafter = deepcopy(DRAFT | DRAFT_SIZES)
    del drafter["is_causal"]
    return drafter
