"""The loader: every field against the tensors that were written, slices of ranks, bytes, memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddtree_numba.model import source
from ddtree_numba.model.config import CheckpointError, load_config, load_drafter_config
from ddtree_numba.model.loader import load_drafter, load_target
from ddtree_numba.model.weights import MoeMlp, TargetWeights
from ddtree_numba.spec.numerics import (
    BF16,
    F32,
    bf16,
    dequantize_int4,
    pack_int4,
    quantize_int4,
    widen,
)
from tests.checkpoints import (
    edit_tensors,
    flat_config,
    nested_config,
    random_tensors,
    shapes,
    shard_of,
    write_tiny,
)
from tests.leaves import leaves, same
from tests.refusals import refusal

PREFIX = "language_model."
LAYER = "model.layers.1."


def keep(tensor: Any, field: str) -> Any:
    """Leave a loaded tensor as it was stored."""
    return tensor


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, np.random.default_rng(7))
    return folder


@pytest.fixture(scope="module")
def dense() -> dict[str, np.ndarray]:
    """The dense tensors of `tiny`, made again from the same seed."""
    return random_tensors(shapes(nested_config()["text_config"]), np.random.default_rng(7))


@pytest.fixture
def own(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A folder that a test may change."""
    write_tiny(tmp_path / "own", rng)
    return tmp_path / "own"


def load(folder: Path, rank: int = 0, world: int = 1, **options: Any) -> TargetWeights:
    return load_target(folder, load_config(folder), rank, world, **options)


def quantized(tensor: np.ndarray) -> np.ndarray:
    values, scale = quantize_int4(tensor)
    return widen(dequantize_int4(pack_int4(values), scale, tensor.shape))


def test_every_field_holds_the_tensors_of_its_names(tiny: Path, dense) -> None:
    weights = load(tiny)
    rounded = {name: widen(bf16(tensor)) for name, tensor in dense.items()}

    def stacked(*names: str) -> np.ndarray:
        return np.concatenate([rounded[LAYER + name] for name in names])

    layer = weights.layers[1]
    assert np.array_equal(weights.embed, rounded["model.embed_tokens.weight"])
    assert np.array_equal(weights.norm, rounded["model.norm.weight"])
    assert np.array_equal(weights.lm_head, rounded["lm_head.weight"])
    assert np.array_equal(layer.input_norm, stacked("input_layernorm.weight"))
    assert np.array_equal(layer.post_norm, stacked("post_attention_layernorm.weight"))
    assert np.array_equal(
        layer.qkv_a,
        stacked("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    )
    assert np.array_equal(layer.q_a_norm, stacked("self_attn.q_a_layernorm.weight"))
    assert np.array_equal(layer.q_b, stacked("self_attn.q_b_proj.weight"))
    assert np.array_equal(layer.kv_a_norm, stacked("self_attn.kv_a_layernorm.weight"))
    assert np.array_equal(layer.o, stacked("self_attn.o_proj.weight"))
    kv_b = stacked("self_attn.kv_b_proj.weight")  # a head: 8 key rows, then 6 value rows
    for head in range(8):
        first = head * 14
        assert np.array_equal(layer.w_uk[head], kv_b[first : first + 8])
        assert np.array_equal(layer.w_uv[head], kv_b[first + 8 : first + 14].T)
    assert np.array_equal(
        weights.layers[0].mlp.gate_up,
        np.concatenate([rounded[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up")]),
    )
    moe = layer.mlp
    assert isinstance(moe, MoeMlp)
    assert np.array_equal(moe.gate, stacked("mlp.gate.weight"))
    assert np.array_equal(moe.bias, dense[f"{LAYER}mlp.gate.e_score_correction_bias"])
    assert np.array_equal(moe.shared.down, stacked("mlp.shared_experts.down_proj.weight"))
    for expert in range(4):
        parts = {
            name: quantized(dense[f"{LAYER}mlp.experts.{expert}.{name}_proj.weight"])
            for name in ("gate", "up", "down")
        }
        both = np.concatenate([parts["gate"], parts["up"]])
        assert np.array_equal(moe.gate_up.dense(expert), both)
        assert np.array_equal(moe.down.dense(expert), parts["down"])


def test_every_field_of_the_drafter_holds_the_tensors_of_its_names(tiny: Path) -> None:
    stored = load_file(tiny / "drafter" / "model.safetensors")
    weights = load_drafter(tiny / "drafter", load_drafter_config(tiny / "drafter"), place=keep)
    layer = weights.layers[1]
    fields = {
        "fc.weight": weights.fc,
        "hidden_norm.weight": weights.hidden_norm,
        "norm.weight": weights.norm,
        "layers.1.input_layernorm.weight": layer.input_norm,
        "layers.1.self_attn.q_proj.weight": layer.qkv[:128],
        "layers.1.self_attn.k_proj.weight": layer.qkv[128:192],
        "layers.1.self_attn.v_proj.weight": layer.qkv[192:],
        "layers.1.self_attn.q_norm.weight": layer.q_norm,
        "layers.1.self_attn.k_norm.weight": layer.k_norm,
        "layers.1.self_attn.o_proj.weight": layer.o,
        "layers.1.post_attention_layernorm.weight": layer.post_norm,
        "layers.1.mlp.gate_proj.weight": layer.mlp.gate_up[:48],
        "layers.1.mlp.up_proj.weight": layer.mlp.gate_up[48:],
        "layers.1.mlp.down_proj.weight": layer.mlp.down,
    }
    assert [name for name, array in fields.items() if not same(array, stored[name])] == []


def test_stored_dtypes_reach_place_and_the_numpy_layout(tiny: Path) -> None:
    stored = {leaf.dtype for leaf in leaves(load(tiny, place=keep))}
    assert stored == {BF16, F32, np.dtype(np.int32)}
    weights = load(tiny)
    assert weights.lm_head.dtype == F32 and weights.lm_head.flags.f_contiguous
    assert weights.layers[0].w_uk.dtype == F32 and weights.layers[0].w_uk.flags.c_contiguous
    moe = weights.layers[1].mlp
    assert isinstance(moe, MoeMlp)
    assert moe.gate_up.packed.dtype == np.int32 and moe.gate_up.scale.dtype == BF16


@pytest.mark.parametrize("world", [2, 4, 8])
def test_shares_of_all_ranks_make_the_whole(tiny: Path, world: int) -> None:
    whole = load(tiny, place=keep)
    ranks = [load(tiny, rank, world, place=keep) for rank in range(world)]

    def rows(pick) -> None:
        assert same(np.concatenate([pick(rank) for rank in ranks]), pick(whole))

    def columns(pick) -> None:
        assert same(np.concatenate([pick(rank) for rank in ranks], axis=-1), pick(whole))

    def halves(pick) -> None:
        """gate and up are cut each, then stacked."""
        parts = [np.split(pick(rank), 2, axis=-2) for rank in ranks]
        joined = [np.concatenate([part[i] for part in parts], axis=-2) for i in (0, 1)]
        assert same(np.concatenate(joined, axis=-2), pick(whole))

    def replicated(pick) -> None:
        assert all(same(pick(rank), pick(whole)) for rank in ranks)

    rows(lambda w: w.embed)
    rows(lambda w: w.lm_head)
    replicated(lambda w: w.norm)
    for name in ("q_b", "w_uk", "w_uv"):
        rows(lambda w, name=name: getattr(w.layers[1], name))
    columns(lambda w: w.layers[1].o)
    for name in ("input_norm", "qkv_a", "q_a_norm", "kv_a_norm", "post_norm"):
        replicated(lambda w, name=name: getattr(w.layers[1], name))
    halves(lambda w: w.layers[0].mlp.gate_up)
    columns(lambda w: w.layers[0].mlp.down)
    replicated(lambda w: w.layers[1].mlp.gate)
    replicated(lambda w: w.layers[1].mlp.bias)
    halves(lambda w: w.layers[1].mlp.shared.gate_up)
    columns(lambda w: w.layers[1].mlp.shared.down)
    for part in ("packed", "scale"):
        halves(lambda w, part=part: getattr(w.layers[2].mlp.gate_up, part))
        columns(lambda w, part=part: getattr(w.layers[2].mlp.down, part))
    assert ranks[0].layers[1].mlp.down.shape == (64, 256 // world)


@pytest.mark.parametrize("world", [2, 8])
def test_shares_of_the_drafter_make_the_whole(tiny: Path, world: int) -> None:
    folder = tiny / "drafter"
    config = load_drafter_config(folder)
    whole = load_drafter(folder, config, place=keep)
    ranks = [load_drafter(folder, config, rank, world, place=keep) for rank in range(world)]
    heads = np.array([128, 64, 64]) // world  # rows of q, k, v on a rank
    parts = [np.split(rank.layers[1].qkv, np.cumsum(heads)[:2]) for rank in ranks]
    joined = np.concatenate([np.concatenate([p[i] for p in parts]) for i in range(3)])
    assert same(joined, whole.layers[1].qkv)
    down = np.concatenate([rank.layers[1].mlp.down for rank in ranks], axis=1)
    assert same(down, whole.layers[1].mlp.down)
    o = np.concatenate([rank.layers[0].o for rank in ranks], axis=1)
    assert same(o, whole.layers[0].o)
    assert same(np.concatenate([rank.fc for rank in ranks]), whole.fc)


def test_l05_latents_are_cut_where_they_are_to_be(embedded: Path) -> None:
    config = replace(load_config(embedded), shards_latents=True)
    ranks = [load_target(embedded, config, rank, 2, place=keep) for rank in range(2)]
    whole = load_target(embedded, config, place=keep).layers[1].qkv_a
    parts = [rank.layers[1].qkv_a for rank in ranks]
    q_a = config.q_lora_rank // 2
    joined = [part[:q_a] for part in parts] + [part[q_a:] for part in parts]
    assert same(np.concatenate(joined), whole)


def test_l05_scales_are_cut_with_their_words(tmp_path: Path, rng: np.random.Generator) -> None:
    config = flat_config() | {"moe_intermediate_size": 64}
    write_tiny(tmp_path, rng, config)
    name = f"{PREFIX}{LAYER}mlp.experts.0.down_proj.weight"
    scale = bf16(np.tile(np.float32([1, 10]), (64, 1)))
    ones = {f"{name}_packed": pack_int4(np.ones((64, 64), np.int8)), f"{name}_scale": scale}
    edit_tensors(shard_of(tmp_path, f"{name}_packed"), lambda tensors: tensors.update(ones))
    parts = []
    for rank in range(2):
        moe = load(tmp_path, rank, 2).layers[1].mlp
        assert isinstance(moe, MoeMlp)
        parts.append(moe.down.dense(0) @ np.ones(32, F32))
    assert np.array_equal(sum(parts), np.full(64, 32 * 1 + 32 * 10))


@pytest.mark.parametrize("world", [3, 16, 0])
def test_l06_a_share_that_is_not_whole_is_refused_before_reading(tiny: Path, world: int) -> None:
    with pytest.raises(CheckpointError, match="tp"):
        load_target(tiny / "no such folder", load_config(tiny), 0, world)
    with pytest.raises(CheckpointError, match="tp"):
        load_drafter(tiny / "no", load_drafter_config(tiny / "drafter"), 0, world)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (1, 1)])
def test_a_rank_outside_the_world(tiny: Path, rank: int, world: int) -> None:
    with pytest.raises(CheckpointError, match="rank"):
        load(tiny, rank, world)


@pytest.mark.parametrize("shape", [[64, 20], [256, 256], [0, 0]])
def test_l07_weight_shape_must_agree(own: Path, shape: list[int]) -> None:
    name = f"{PREFIX}{LAYER}mlp.experts.3.down_proj.weight_shape"
    shard = shard_of(own, name)
    edit_tensors(shard, lambda tensors: tensors.update({name: np.array(shape, np.int32)}))
    message = refusal(lambda: load(own), shard.name)
    assert "down_proj.weight_shape" in message and str(shape) in message and "[64, 256]" in message


def test_l07_weight_shape_may_be_int64(own: Path) -> None:
    before = load(own, place=keep)
    name = f"{PREFIX}{LAYER}mlp.experts.3.down_proj.weight_shape"
    wide = {name: np.array([64, 256], np.int64)}
    edit_tensors(shard_of(own, name), lambda tensors: tensors.update(wide))
    assert all(map(same, leaves(load(own, place=keep)), leaves(before)))


def test_l10_both_name_styles_give_equal_weights(tmp_path: Path) -> None:
    write_tiny(tmp_path / "nested", np.random.default_rng(3))
    write_tiny(tmp_path / "flat", np.random.default_rng(3), flat_config(), shards=1, prefix="")
    nested, flat = load(tmp_path / "nested", place=keep), load(tmp_path / "flat", place=keep)
    assert all(map(same, leaves(nested), leaves(flat)))


def test_errors_come_before_any_tensor_is_read(own: Path, monkeypatch) -> None:
    name = f"{PREFIX}model.layers.2.self_attn.o_proj.weight"
    edit_tensors(shard_of(own, name), lambda tensors: tensors.pop(name))
    monkeypatch.setattr(source, "read_group", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError, match="no file has"):
        load(own)
