"""config.json of a DFlash drafter: what is read, what is refused, and in which words."""

import math
from pathlib import Path
from typing import Any

import pytest

from ddtree_numba.model.config import DrafterConfig, check_pair, load_config, load_drafter_config
from tests.checkpoints import drafter_config, nested_config
from tests.published import k25_drafter, k26, k26_drafter
from tests.refusals import Edit, refusal, write


def load_drafter(folder: Path, config: dict[str, Any]) -> DrafterConfig:
    return load_drafter_config(write(folder, config))


def test_k26_drafter_as_published(tmp_path: Path) -> None:
    config = load_drafter(tmp_path, k26_drafter())
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert (config.block_size, config.mask_token_id, config.head_dim) == (8, 163838, 128)
    assert config.rope_attention_factor == 1.0
    assert config.layer_types == ("full_attention",) * 6
    assert config.visibility(0) == (False, None)
    check_pair(load_config(write(tmp_path, k26())), config)


def test_drafter_amplitude(tmp_path: Path) -> None:
    plain = load_drafter(tmp_path, k25_drafter())
    assert plain.rope_attention_factor == pytest.approx(1.4158883083359672, abs=1e-15)
    ratio = k26_drafter()
    ratio["rope_parameters"]["mscale_all_dim"] = 0.0
    stretched = load_drafter(tmp_path, ratio).rope_attention_factor
    assert stretched == pytest.approx(0.1 * math.log(64) + 1)
    explicit = k25_drafter()
    explicit["rope_scaling"]["attention_factor"] = 1.25
    assert load_drafter(tmp_path, explicit).rope_attention_factor == 1.25
    folder = write(tmp_path, k25_drafter())
    assert load_drafter_config(folder, rope_attention_factor=1.0).rope_attention_factor == 1.0
    unstretched = drafter_config() | {"rope_scaling": None}
    assert load_drafter(tmp_path, unstretched).rope_attention_factor == 1.0


def in_dflash(**values: Any) -> Edit:
    return lambda config: config["dflash_config"].update(values)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update(dflash_config={"mask_token_id": 5}), ["target_layer_ids is missing"]),
        (lambda c: c.pop("dflash_config"), ["dflash_config.target_layer_ids is missing"]),
        (in_dflash(target_layer_ids=[]), ["target_layer_ids is empty"]),
        (in_dflash(target_layer_ids=[0, 3]), ["target_layer_ids", "holds 3", "0 to 2"]),
        (in_dflash(target_layer_ids=[-1, 2]), ["target_layer_ids", "holds -1"]),
        (in_dflash(target_layer_ids=[0, "2"]), ["target_layer_ids"]),
    ],
)
def test_s31_taps_must_be_named_and_in_range(tmp_path: Path, edit: Edit, words) -> None:
    config = drafter_config()
    edit(config)
    message = refusal(lambda: load_drafter(tmp_path, config))
    assert all(word in message for word in words), message


def test_s31_the_key_is_asked_for_before_anything_else(tmp_path: Path) -> None:
    config = {"block_size": 16, "dflash_config": {"mask_token_id": 5}}
    assert "target_layer_ids is missing" in refusal(lambda: load_drafter(tmp_path, config))


def test_s31_an_id_equal_to_the_layer_count_is_not_clamped(tmp_path: Path) -> None:
    config = k26_drafter()
    config["dflash_config"]["target_layer_ids"] = [1, 16, 31, 46, 61]
    assert "holds 61" in refusal(lambda: load_drafter(tmp_path, config))
    config["dflash_config"]["target_layer_ids"] = [0, 16, 31, 46, 60]
    assert load_drafter(tmp_path, config).target_layer_ids == (0, 16, 31, 46, 60)


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda c: c.update(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
        (lambda c: c.update(quantization_config={}), "quantization_config"),
        (lambda c: c.update(attention_bias=True), "attention_bias"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act"),
        (lambda c: c.update(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (in_dflash(causal_head=True), "causal_head"),
        (in_dflash(input_embedding_scale=2.0), "input_embedding_scale"),
        (in_dflash(output_multiplier=0.5), "output_multiplier"),
        (in_dflash(selector_top_k=16), "selector_top_k"),
        (in_dflash(brand_new=3), "brand_new"),
        (in_dflash(mask_token_id=128), "mask_token_id"),
        (in_dflash(mask_token_id=-1), "mask_token_id"),
        (in_dflash(mask_token_id="<|MASK|>"), "mask_token_id"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
        (lambda c: c.update(num_attention_heads=12), "num_attention_heads"),
        (lambda c: c.update(head_dim=7), "head_dim"),
        (lambda c: c.update(layer_types=["full_attention"]), "layer_types"),
        (lambda c: c.update(layer_types=["full_attention", "linear"]), "layer_types"),
        (lambda c: c.update(layer_types=["sliding_attention"] * 2), "sliding_window is missing"),
        (lambda c: c.update(use_sliding_window=True, sliding_window=4096), "layer_types"),
        (lambda c: c.update(is_causal="yes"), "is_causal"),
        (lambda c: c.pop("num_target_layers"), "num_target_layers is missing"),
        (lambda c: c.pop("head_dim"), "head_dim is missing"),
    ],
)
def test_drafters_that_would_run_wrong_are_refused(tmp_path: Path, edit: Edit, word: str) -> None:
    config = drafter_config()
    edit(config)
    assert word in refusal(lambda: load_drafter(tmp_path, config))


def test_newer_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    config = drafter_config()
    in_dflash(causal_head=False, input_embedding_scale=1.0, final_logit_softcapping=None)(config)
    assert load_drafter(tmp_path, config) == load_drafter(tmp_path, drafter_config())


def test_block_size_of_dflash_config_comes_first(tmp_path: Path) -> None:
    config = drafter_config()
    in_dflash(block_size=4)(config)
    assert load_drafter(tmp_path, config).block_size == 4
    del config["block_size"], config["dflash_config"]["block_size"]
    assert load_drafter(tmp_path, config).block_size == 16


def test_visibility_of_layers(tmp_path: Path) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    config = load_drafter(tmp_path, drafter_config() | kinds)
    assert [config.visibility(layer) for layer in (0, 1)] == [(True, 32), (False, None)]
    config = load_drafter(tmp_path, drafter_config() | kinds | {"is_causal": False})
    assert [config.visibility(layer) for layer in (0, 1)] == [(False, 32), (False, None)]


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_target_layers"])
def test_drafter_of_another_target(tmp_path: Path, key: str) -> None:
    target = load_config(write(tmp_path, nested_config()))
    config = drafter_config()
    size, config[key] = config[key], config[key] * 2
    drafter, folders = load_drafter(tmp_path, config), (Path("target"), Path("other"))
    sizes = f"{key} is {2 * size}, the target has {size}"
    assert refusal(lambda: check_pair(target, drafter), file="drafter") == f"drafter {sizes}"
    line = refusal(lambda: check_pair(target, drafter, *folders))
    assert line == f"other/config.json: {sizes} (target/config.json)"
