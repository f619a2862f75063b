"""config.json of Kimi K2.6, of K2.5 where it differs, and of their DFlash drafters."""

from typing import Any

from tests.checkpoints import QUANTIZATION, drafter_config, nested_config

YARN = {
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
K25_IGNORE = ["lm_head", *QUANTIZATION["ignore"][:3]]


def k26() -> dict[str, Any]:
    config = nested_config()
    config |= {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
    config["text_config"] |= {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 262144,
        "vocab_size": 163840,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "rope_scaling": YARN | {"type": "yarn"},
        "rope_theta": 50000.0,
    }
    return config


def k25() -> dict[str, Any]:
    config = k26()
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = 163585
    config["text_config"]["quantization_config"]["ignore"] = list(K25_IGNORE)
    return config


def k26_drafter() -> dict[str, Any]:
    config = drafter_config()
    del config["rope_scaling"]
    return config | {
        "hidden_size": 7168,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 18432,
        "vocab_size": 163840,
        "num_target_layers": 61,
        "max_position_embeddings": 262144,
        "rope_parameters": YARN | {"rope_type": "deepseek_yarn", "rope_theta": 50000.0},
        "dflash_config": {
            "target_layer_ids": [1, 12, 24, 35, 47, 58],
            "mask_token_id": 163838,
        },
    }


def k25_drafter() -> dict[str, Any]:
    config = k26_drafter()
    del config["rope_parameters"]
    return config | {"rope_scaling": YARN | {"rope_type": "yarn"}, "rope_theta": 50000.0}
