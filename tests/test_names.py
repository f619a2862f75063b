"""The table of names against the published lists, and a checkpoint's names against the table."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.model.checkpoint import Checkpoint
from ddtree_numba.model.config import load_config, load_drafter_config
from ddtree_numba.model.manifest import Manifest, drafter_manifest, target_manifest
from ddtree_numba.model.names import drafter_pieces, target_pieces
from ddtree_numba.model.quantization import Quantization
from ddtree_numba.model.weights import (
    DenseMlp,
    DrafterWeights,
    DraftLayerWeights,
    LayerWeights,
    MoeMlp,
    TargetWeights,
)
from ddtree_numba.spec.numerics import BF16, bf16
from golden.checkpoint_writer import EXPERT
from tests.checkpoints import (
    drafter_config,
    drafter_shapes,
    edit_tensors,
    flat_config,
    nested_config,
    shapes,
    shard_of,
    write_tiny,
)
from tests.published import K25_IGNORE, k26
from tests.refusals import refusal, write

PREFIX = "language_model."
IGNORE = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:vision_tower.*")


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Path:
    write_tiny(tmp_path / "tiny", rng)
    return tmp_path / "tiny"


def manifest(folder: Path) -> Manifest:
    return target_manifest(Checkpoint(folder), load_config(folder))


def stored_shapes(dense: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The published form of a list of dense tensors, INT4 experts in three tensors each."""
    stored: dict[str, tuple[int, ...]] = {}
    for name, shape in dense.items():
        if EXPERT.fullmatch(name):
            rows, columns = shape
            stored[f"{name}_packed"] = (rows, columns // 8)
            stored[f"{name}_scale"] = (rows, columns // 32)
            stored[f"{name}_shape"] = (2,)
        else:
            stored[name] = shape
    return stored


@pytest.mark.parametrize("config", [nested_config(), k26()], ids=["tiny", "k26"])
def test_target_table_is_the_published_list(tmp_path: Path, config: dict) -> None:
    pieces = list(target_pieces(load_config(write(tmp_path, config))))
    expected = stored_shapes(shapes(config["text_config"]))
    assert {piece.name: piece.shape for piece in pieces} == expected
    assert len(pieces) == len(expected)


def test_drafter_table_is_the_published_list(tmp_path: Path) -> None:
    pieces = list(drafter_pieces(load_drafter_config(write(tmp_path, drafter_config()))))
    assert {piece.name: piece.shape for piece in pieces} == drafter_shapes(drafter_config())


def test_every_field_of_the_table_is_a_field_of_the_weights(tmp_path: Path) -> None:
    known = {field.name for kind in (TargetWeights, LayerWeights, MoeMlp) for field in fields(kind)}
    known |= {field.name for kind in (DrafterWeights, DraftLayerWeights) for field in fields(kind)}
    known |= {field.name for field in fields(DenseMlp)} | {"kv_b", "packed", "scale", "shape"}
    pieces = list(target_pieces(load_config(write(tmp_path, nested_config()))))
    pieces += drafter_pieces(load_drafter_config(write(tmp_path, drafter_config())))
    words = {word for piece in pieces for word in piece.field.split(".") if not word.isdigit()}
    assert words <= known


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_l04_patterns_match_from_the_start_of_stored_names(prefix: str) -> None:
    quantization = Quantization(32, ("Linear",), IGNORE)
    layer = f"{prefix}model.layers.1."
    assert quantization.covers(f"{layer}mlp.experts.0.gate_proj")
    assert not quantization.covers(f"{layer}self_attn.q_b_proj")
    assert not quantization.covers(f"{layer}mlp.shared_experts.up_proj")
    assert not quantization.covers(f"{prefix}lm_head")
    assert quantization.covers(f"{prefix}lm_head_2")
    assert quantization.covers(f"{layer}vision_tower.x")  # from the start, not anywhere
    assert not quantization.covers("vision_tower.x")


def test_l04_targets_may_be_patterns_or_a_class() -> None:
    assert Quantization(32, (r"re:.*experts\.\d+",), ()).covers("model.layers.1.mlp.experts.3.x")
    assert not Quantization(32, (r"re:.*experts\.\d+",), ()).covers("model.layers.1.mlp.up_proj")
    assert not Quantization(32, ("Linear",), ("Linear",)).covers("lm_head")


def test_l04_the_older_ignore_list_loads(tmp_path: Path, rng: np.random.Generator) -> None:
    config = nested_config()
    config["text_config"]["quantization_config"]["ignore"] = K25_IGNORE
    write_tiny(tmp_path, rng, config)
    assert manifest(tmp_path).skipped_tensors == 0


@pytest.mark.parametrize(
    ("ignore", "words"),
    [
        ([*K25_IGNORE, "re:.*experts.*"], ["experts.0.gate_proj", "stored packed"]),
        (["lm_head"], ["self_attn.q_a_proj", "stored plain"]),
        (["lm_head", "re:self_attn"], ["self_attn.q_a_proj", "stored plain"]),
    ],
)
def test_l04_config_and_tensors_disagree(tmp_path: Path, rng, ignore, words) -> None:
    config = nested_config()
    config["text_config"]["quantization_config"]["ignore"] = ignore
    write_tiny(tmp_path, rng, config)
    message = refusal(lambda: manifest(tmp_path))
    assert all(word in message for word in words), message


def test_l04_packed_tensors_without_a_quantization_section(tmp_path: Path, rng) -> None:
    config = nested_config()
    del config["text_config"]["quantization_config"]
    write_tiny(tmp_path, rng, config)
    assert "no quantization_config covers" in refusal(lambda: manifest(tmp_path))


def test_experts_in_16_bit_are_refused_by_name(tiny: Path) -> None:
    name = f"{PREFIX}model.layers.1.mlp.experts.2.up_proj.weight"

    def unpack(tensors: dict[str, np.ndarray]) -> None:
        for part in ("packed", "scale", "shape"):
            del tensors[f"{name}_{part}"]
        tensors[name] = np.zeros((256, 64), BF16)

    edit_tensors(shard_of(tiny, f"{name}_packed"), unpack)
    message = refusal(lambda: manifest(tiny), name)
    assert "plain BF16" in message and "INT4" in message


def test_packed_attention_is_refused(tiny: Path) -> None:
    name = f"{PREFIX}model.layers.0.self_attn.o_proj.weight"
    edit_tensors(
        shard_of(tiny, name), lambda t: t.update({f"{name}_packed": np.zeros((64, 6), "i4")})
    )
    assert "only routed experts" in refusal(lambda: manifest(tiny), f"{name}_packed")


def test_l10_vision_tensors_are_skipped_and_counted(tiny: Path) -> None:
    name = f"{PREFIX}model.norm.weight"
    extra = {
        "vision_tower.encoder.blocks.0.weight": bf16(np.ones((4, 4))),
        "mm_projector.proj.0.bias": np.ones(3, np.float32),
    }
    edit_tensors(shard_of(tiny, name), lambda tensors: tensors.update(extra))
    assert (manifest(tiny).skipped_tensors, manifest(tiny).skipped_bytes) == (2, 44)


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}model.layers.0.mlp.typo.weight",
        f"{PREFIX}model.layers.3.input_layernorm.weight",
        f"{PREFIX}model.layers.1.mlp.experts.4.up_proj.weight_packed",
        f"{PREFIX}model.layers.1.mlp.experts.0.up_proj.weight_zero_point",
        f"{PREFIX}layers.0.input_layernorm.weight",
        "tower.weight",
    ],
)
def test_l10_any_other_unknown_tensor_is_an_error(tiny: Path, name: str) -> None:
    shard = shard_of(tiny, f"{PREFIX}model.norm.weight")
    edit_tensors(shard, lambda tensors: tensors.update({name: bf16(np.ones(4))}))
    assert f"unknown tensor {name}" in refusal(lambda: manifest(tiny), shard.name)


def test_the_same_tensor_with_and_without_prefix(tiny: Path) -> None:
    shard = shard_of(tiny, f"{PREFIX}model.norm.weight")
    edit_tensors(shard, lambda tensors: tensors.update({"model.norm.weight": bf16(np.ones(64))}))
    assert "same tensor" in refusal(lambda: manifest(tiny), "model.norm.weight")


def test_missing_tensors_are_named(tiny: Path) -> None:
    name = f"{PREFIX}model.layers.2.self_attn.kv_b_proj.weight"
    edit_tensors(shard_of(tiny, name), lambda tensors: tensors.pop(name))
    assert "no file has" in refusal(lambda: manifest(tiny), name.removeprefix(PREFIX))


@pytest.mark.parametrize(
    ("name", "tensor", "found", "expected"),
    [
        ("model.norm.weight", np.ones(64, np.float32), "F32 [64]", "BF16 [64]"),
        ("model.norm.weight", np.ones(32, BF16), "BF16 [32]", "BF16 [64]"),
        ("lm_head.weight", np.ones((64, 128), BF16), "BF16 [64, 128]", "BF16 [128, 64]"),
        (
            "model.layers.1.mlp.gate.e_score_correction_bias",
            np.ones(4, BF16),
            "BF16 [4]",
            "F32 [4]",
        ),
        (
            "model.layers.1.mlp.experts.0.down_proj.weight_scale",
            np.ones((64, 4), BF16),
            "BF16 [64, 4]",
            "BF16 [64, 8]",
        ),
    ],
)
def test_wrong_shape_or_dtype_names_tensor_file_both(tiny, name, tensor, found, expected) -> None:
    shard = shard_of(tiny, PREFIX + name)
    edit_tensors(shard, lambda tensors: tensors.update({PREFIX + name: tensor}))
    message = refusal(lambda: manifest(tiny), shard.name)
    assert all(word in message for word in (PREFIX + name, found, expected)), message


def test_s31_fc_built_for_another_number_of_taps(tiny: Path) -> None:
    fc = {"fc.weight": bf16(np.ones((64, 5 * 64)))}
    edit_tensors(tiny / "drafter" / "model.safetensors", lambda tensors: tensors.update(fc))
    config = load_drafter_config(tiny / "drafter")
    message = refusal(
        lambda: drafter_manifest(Checkpoint(tiny / "drafter"), config), "model.safetensors"
    )
    assert "fc.weight" in message and "5 taps" in message and "names 2" in message


def test_drafter_names_may_carry_a_prefix_and_rotary_caches(tiny: Path) -> None:
    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    edit_tensors(tiny / "drafter" / "model.safetensors", rename)
    config = load_drafter_config(tiny / "drafter")
    assert drafter_manifest(Checkpoint(tiny / "drafter"), config).skipped_tensors == 1


def test_flat_config_and_names_without_prefix(tmp_path: Path, rng: np.random.Generator) -> None:
    write_tiny(tmp_path, rng, flat_config(), prefix="")
    assert manifest(tmp_path).fields
