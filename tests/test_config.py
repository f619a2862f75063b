"""config.json of a target: what is read, what is refused, and in which words."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ddtree_numba.model.config import ModelConfig, load_config
from tests.checkpoints import QUANTIZATION, TEXT, flat_config, nested_config
from tests.published import YARN, k25, k26
from tests.refusals import Edit, refusal, write


def load(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> ModelConfig:
    return load_config(write(folder, config, **files))


def test_k26_as_published(tmp_path: Path) -> None:
    config = load(tmp_path, k26(), generation_config={"eos_token_id": 163586})
    assert (config.hidden_size, config.num_hidden_layers, config.n_routed_experts) == (
        7168,
        61,
        384,
    )
    assert config.rope_scaling == YARN | {"rope_type": "yarn"} and config.rope_theta == 50000.0
    assert config.rms_norm_eps == config.mla_norm_eps == 1e-5
    assert config.routed_scaling_factor == 2.827
    assert (config.bos_token_id, config.pad_token_id) == (163584, 163839)
    assert config.quantization is not None and config.quantization.group_size == 32


def test_latent_norm_epsilon_is_a_switch(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, k26()), mla_norm_eps=1e-6).mla_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (k25(), {"eos_token_id": 163586}, (163585, 163586)),
        (k26(), {"eos_token_id": 163585}, (163585, 163586)),
        (k26(), {"eos_token_id": [163585, 163586]}, (163585, 163586)),
        (k26(), {"eos_token_id": None}, (163586,)),
        (k26(), None, (163586,)),
        (k25(), None, (163585,)),
    ],
)
def test_t01_end_tokens_of_all_files_add_up(tmp_path, config, generation, expected) -> None:
    files = {} if generation is None else {"generation_config": generation}
    assert load(tmp_path, config, **files).eos_token_ids == expected


def test_t01_top_level_and_text_model_may_differ(tmp_path: Path) -> None:
    assert load(tmp_path, k26() | {"eos_token_id": 163585}).eos_token_ids == (163585, 163586)


def test_end_token_outside_the_vocabulary(tmp_path: Path) -> None:
    files = {"generation_config": {"eos_token_id": 163840}}
    assert "163840" in refusal(lambda: load(tmp_path, k26(), **files))


def test_l09_flat_and_nested_read_the_same(tmp_path: Path) -> None:
    nested = load(tmp_path, nested_config())
    assert nested.quantization is not None
    assert load(tmp_path, flat_config()) == nested
    moved = nested_config()
    moved["quantization_config"] = moved["text_config"].pop("quantization_config")
    assert load(tmp_path, moved) == nested
    both = nested_config() | {"quantization_config": QUANTIZATION}
    assert load(tmp_path, both) == nested


def test_l09_contradicting_sections_are_refused(tmp_path: Path) -> None:
    config = nested_config() | {"quantization_config": deepcopy(QUANTIZATION)}
    config["quantization_config"]["ignore"] = ["lm_head"]
    message = refusal(lambda: load(tmp_path, config))
    assert "ignore" in message and "text_config" in message
    config = nested_config() | {"quantization_config": deepcopy(QUANTIZATION)}
    weights(config["quantization_config"])["group_size"] = 64
    assert "group_size is 64" in refusal(lambda: load(tmp_path, config))


def test_l09_a_16_bit_conversion_is_not_called_quantized(tmp_path: Path) -> None:
    config = flat_config()
    del config["quantization_config"]
    assert load(tmp_path, config).quantization is None


def weights(quantization: dict[str, Any]) -> dict[str, Any]:
    return quantization["config_groups"]["group_0"]["weights"]


def in_weights(key: str, value: Any) -> Edit:
    return lambda section: weights(section).__setitem__(key, value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda q: q.update(quant_method="fp8"), ["quant_method", "fp8", "FP8"]),
        (lambda q: q.update(quant_method="modelopt", quant_algo="NVFP4"), ["modelopt", "NVFP4"]),
        (lambda q: q.update(quant_method="gptq"), ["GPTQ"]),
        (lambda q: q.update(quant_method="awq"), ["AWQ"]),
        (lambda q: q.update(quant_method=["odd"]), ["quant_method"]),
        (lambda q: q.update(format="nvfp4-pack-quantized"), ["format", "NVFP4"]),
        (lambda q: q.update(format="float-quantized"), ["format", "FP8"]),
        (lambda q: q.pop("format"), ["format is missing"]),
        (lambda q: q.update(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme"]),
        (lambda q: q.update(config_groups={}), ["config_groups"]),
        (lambda q: q["config_groups"].update(group_1={}), ["config_groups"]),
        (lambda q: q["config_groups"]["group_0"].pop("weights"), ["weights"]),
        (
            lambda q: q["config_groups"]["group_0"].update(input_activations={"num_bits": 8}),
            ["input_activations"],
        ),
        (lambda q: weights(q).pop("group_size"), ["group_size is missing"]),
        (in_weights("group_size", 128), ["group_size is 128"]),
        (in_weights("num_bits", 8), ["num_bits is 8"]),
        (in_weights("type", "float"), ["type is 'float'"]),
        (in_weights("symmetric", False), ["symmetric is False"]),
        (in_weights("actorder", "group"), ["actorder is 'group'"]),
        (in_weights("strategy", "channel"), ["strategy is 'channel'"]),
        (in_weights("dynamic", True), ["dynamic is True"]),
        (lambda q: q.update(ignore=["re:(.*"]), ["ignore", "re:(.*"]),
        (lambda q: q.update(ignore="lm_head"), ["ignore"]),
    ],
)
def test_l09_other_quantizations_are_refused_by_name(tmp_path, edit: Edit, words) -> None:
    config = nested_config()
    edit(config["text_config"]["quantization_config"])
    message = refusal(lambda: load(tmp_path, config))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("text", ["{", "", "[1]", "\ufeff{}", '{"a": 1,}'])
def test_l09_broken_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert "JSON" in refusal(lambda: load_config(tmp_path))


def test_missing_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(lambda: load_config(tmp_path))
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    assert "JSON" in refusal(lambda: load_config(tmp_path))


OPTIONAL = {  # keys with one supported value, or that another section gives
    *("architectures", "attention_bias", "moe_layer_freq", "n_group", "topk_group", "scoring_func"),
    *("topk_method", "norm_topk_prob", "hidden_act", "tie_word_embeddings", "dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "num_key_value_heads", "rope_scaling"),
    *("num_nextn_predict_layers", "quantization_config"),
}


@pytest.mark.parametrize("key", sorted(TEXT.keys() - OPTIONAL))
def test_every_missing_key_is_named(tmp_path: Path, key: str) -> None:
    config = nested_config()
    del config["text_config"][key]
    assert f"text_config.{key} is missing" in refusal(lambda: load(tmp_path, config))
    config["text_config"][key] = "many"
    assert f"text_config.{key}" in refusal(lambda: load(tmp_path, config))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("n_group", 8),
        ("topk_group", 4),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("moe_layer_freq", 2),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("rope_interleave", False),
        ("dtype", "float16"),
        ("torch_dtype", "float32"),
        ("num_key_value_heads", 2),
        ("num_experts_per_tok", 5),
        ("qk_rope_head_dim", 5),
        ("hidden_size", 72),
        ("moe_intermediate_size", 48),
        ("hidden_size", 64.0),
        ("vocab_size", True),
        ("rms_norm_eps", -1e-5),
        ("bos_token_id", 128),
        ("eos_token_id", [114, "x"]),
        ("rope_scaling", "yarn"),
        ("rope_scaling", {"type": "linear", "factor": 4.0}),
        ("rope_scaling", {"type": "yarn"}),
        ("rope_scaling", YARN | {"type": "yarn", "factor": 0.5}),
        ("rope_scaling", YARN | {"type": "yarn", "truncate": False}),
        ("rope_scaling", YARN | {"type": "yarn", "attention_factor": 1.2}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, key: str, value: Any) -> None:
    config = nested_config()
    config["text_config"][key] = value
    assert key in refusal(lambda: load(tmp_path, config))


@pytest.mark.parametrize("spelling", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_spellings(tmp_path: Path, key: str, spelling: str) -> None:
    config = flat_config()
    del config["dtype"]
    assert load(tmp_path, config | {key: spelling}) == load(tmp_path, flat_config())


def resaved() -> dict[str, Any]:
    """As transformers 5 writes the model again: other type, rope_parameters."""
    config = flat_config() | {"model_type": "deepseek_v3"}
    scaling = config.pop("rope_scaling")
    theta = config.pop("rope_theta")
    config["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": theta}
    return config


def test_both_rope_spellings(tmp_path: Path) -> None:
    old = load(tmp_path, flat_config())
    assert load(tmp_path, resaved()) == old
    assert load(tmp_path, resaved() | {"rope_theta": 50000.0}) == old
    assert load(tmp_path, flat_config() | resaved()) == old
    other = resaved()
    other["rope_parameters"]["factor"] = 4.0
    assert "rope" in refusal(lambda: load(tmp_path, flat_config() | other))
    assert "rope_theta" in refusal(lambda: load(tmp_path, resaved() | {"rope_theta": 1e4}))


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}],
)
def test_m04_without_yarn(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = flat_config()
    del config["rope_scaling"]
    assert load(tmp_path, config | rope).rope_scaling is None


@pytest.mark.parametrize("key", ["rope_theta", "beta_fast", "beta_slow"])
def test_frequencies_without_a_logarithm_are_refused(tmp_path: Path, key: str) -> None:
    config = flat_config()
    (config if key == "rope_theta" else config["rope_scaling"])[key] = 0.0
    assert key in refusal(lambda: load(tmp_path, config))


def test_json_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "config.json" in refusal(lambda: load_config(tmp_path))


def test_missing_yarn_keys_mean_what_the_published_code_makes_of_them(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    read = load(tmp_path, flat_config() | {"rope_scaling": scaling}).rope_scaling
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    assert read == defaults | {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
