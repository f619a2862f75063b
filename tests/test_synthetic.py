"""The writer of random checkpoints: published names and shards, valid content, room on the disk."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddtree_numba.engine import Engine
from ddtree_numba.model.checkpoint import Checkpoint
from ddtree_numba.model.config import load_config, load_drafter_config
from ddtree_numba.model.fields import read_json
from ddtree_numba.model.loader import load_target
from ddtree_numba.model.manifest import target_manifest
from golden import k26, make_synthetic
from golden.make_synthetic import main, resized, target_shards, write
from tests import published
from tests.answers import decode, sampling
from tests.refusals import refusal
from tests.refusals import write as write_config


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Path:
    """The embedded model's sizes with two layers; tests only read it."""
    folder = tmp_path_factory.mktemp("small")
    config = resized(read_json(golden / "tiny" / "config.json"), 2, None)
    drafter = read_json(golden / "tiny" / "drafter" / "config.json")
    drafter |= {"num_target_layers": 2}
    drafter["dflash_config"]["target_layer_ids"] = [0, 1]
    write(folder, config, drafter, seed=5)
    return folder


@pytest.mark.parametrize(
    ("load", "ours", "theirs"),
    [
        (load_config, k26.config, published.k26),
        (load_drafter_config, k26.drafter_config, published.k26_drafter),
    ],
)
def test_the_configuration_of_k26_is_the_published_one(tmp_path: Path, load, ours, theirs) -> None:
    assert load(write_config(tmp_path, ours())) == load(write_config(tmp_path, theirs()))


def test_shards_of_k26_are_the_published_ones(tmp_path: Path) -> None:
    shards = target_shards(tmp_path, load_config(write_config(tmp_path, k26.config())))
    names = [path.name for path in shards]
    assert names == [f"model-{i:05d}-of-000064.safetensors" for i in range(1, 65)]
    tensors = list(shards.values())
    sizes = [sum(tensor.nbytes for tensor in shard) for shard in tensors]
    assert 990e6 < sizes[0] < 1000e6
    assert set(sizes[1:61]) == {9_808_554_496}
    assert sum(sizes[:62]) == 594_205_904_896
    assert sum(len(shard) for shard in tensors[:62]) == 208_215
    assert {t.name for t in tensors[61]} == {
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    }
    layers = {t.name.split(".")[3] for t in tensors[7]}
    assert layers == {"7"}


def test_the_folder_is_a_checkpoint_whose_vision_is_skipped(small: Path) -> None:
    checkpoint = Checkpoint(small)
    manifest = target_manifest(checkpoint, load_config(small))
    assert manifest.skipped_tensors == 2 and len(checkpoint.files) == 5
    index = json.loads((small / "model.safetensors.index.json").read_text())
    stored = {}
    for path in checkpoint.files:
        stored |= load_file(path)  # the library reads it too
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert all(np.isfinite(t.astype("f4")).all() for t in stored.values())
    for layer in Counter(name.split(".")[3] for name in stored if ".layers." in name):
        prefix = f"language_model.model.layers.{layer}."
        assert len({f for n, f in index["weight_map"].items() if n.startswith(prefix)}) == 1


def test_weights_are_of_use(small: Path) -> None:
    """Experts differ, INT4 values use their range, logits neither vanish nor explode."""
    weights = load_target(small, load_config(small))
    moe = weights.layers[1].mlp
    dense = [moe.gate_up.dense(expert) for expert in (0, 1)]
    assert not np.array_equal(*dense)
    assert 0.5 < dense[0].std() * np.sqrt(192) < 2
    assert len(np.unique(moe.gate_up.packed)) > moe.gate_up.packed.size // 2


def test_the_command_s_engine_runs_on_it(small: Path) -> None:
    engine = Engine.load(small, backend="numpy", max_context=64)
    plain, drafted = (decode(engine, ["def f"], sampling(None, 8), m)[0] for m in ("ar", "ddtree"))
    assert len(plain) == 8 and plain == drafted


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_equal_options_give_equal_bytes(tmp_path: Path, golden: Path) -> None:
    options = ["--config", str(golden / "tiny"), "--layers", "2", "--experts", "5"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main([str(tmp_path / name), *options, "--seed", seed]) == 0
    a, b, c = (content(tmp_path / name) for name in "abc")
    assert a == b and a.keys() == c.keys()
    shards = [name for name in a if "model-" in name]
    assert len(shards) == 5 and all(a[name] != c[name] for name in shards)
    assert load_config(tmp_path / "a").n_routed_experts == 5


def complaint(capsys, *argv: str) -> str:
    assert main(list(argv)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_what_does_not_fit_is_refused_in_a_line(tmp_path, capsys, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=9 << 30)
    monkeypatch.setattr(make_synthetic.shutil, "disk_usage", lambda _: usage)
    text = complaint(capsys, str(tmp_path / "new"), "--layers", "3")
    assert "25.3 GB" in text and "9.7 GB that are free" in text
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_left_alone(tmp_path, capsys, small: Path) -> None:
    assert "not an empty folder" in complaint(capsys, str(small))
    assert "num_hidden_layers" in complaint(capsys, str(tmp_path / "x"), "--layers", "0")
    assert "no such file" in complaint(capsys, str(tmp_path / "y"), "--config", str(tmp_path))


def test_a_write_that_fails_leaves_nothing_that_could_be_taken_for_whole(
    tmp_path: Path, golden: Path, monkeypatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make_synthetic.os, "replace", full)
    config = read_json(golden / "tiny" / "config.json")
    assert "No space left" in refusal(lambda: write(tmp_path / "x", config), "model-00001")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (None, ["--layers", "-1"], "--layers -1: num_hidden_layers can be 1 to 6"),
        (None, ["--layers", "99999"], "--layers 99999: num_hidden_layers can be 1 to 6"),
        (None, ["--experts", "0"], "--experts 0: n_routed_experts can be 1 to"),
        (None, ["--seed", "-1"], "the seed must be at least 0, not -1"),
        (None, ["--drafter", "."], "dflash_config.target_layer_ids is missing"),
        ({"text_config": []}, ["--layers", "2"], "text_config must be an object, not []"),
        ({"text_config": {}}, ["--experts", "2"], "n_routed_experts is missing"),
        ({"n_routed_experts": 4}, ["--experts", "2"], "num_experts_per_tok is missing"),
        ({"text_config": {}}, [], "model_type is missing"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_a_refused_run_leaves_nothing(
    tmp_path, golden, capsys, monkeypatch, config, options, message, there
) -> None:
    (tmp_path / "odd").mkdir()
    monkeypatch.chdir(write_config(tmp_path / "odd", config or {}))
    source, new = golden / "tiny" if config is None else Path(), tmp_path / "new"
    if there:
        new.mkdir()
    assert message in complaint(capsys, str(new), "--config", str(source), *options)
    assert new.exists() == there and not list(new.glob("*"))
