"""Every way in which a checkpoint can be wrong, through the command: one line that names it, exit
code 1, and not a byte of a weight was read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.model.checkpoint import INDEX
from ddtree_numba.model.fields import read_json
from ddtree_numba.model.reading import Files
from golden.make_synthetic import resized, write
from tests.checkpoints import edit_tensors, shard_of
from tests.command import run

NORM = "language_model.model.norm.weight"
EXPERT = "language_model.model.layers.1.mlp.experts.3.down_proj.weight_packed"
GATE = "language_model.model.layers.1.mlp.gate.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write(folder, resized(read_json(golden / "tiny" / "config.json"), 2, 4))
    return folder


@pytest.fixture
def own(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "own")


Edit = Callable[[dict[str, np.ndarray]], object]


def edited(name: str, edit: Edit) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(shard_of(folder, name), edit)


def misplaced(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"][NORM] = content["weight_map"][GATE]
    (folder / INDEX).write_text(json.dumps(content))


def twice(folder: Path) -> None:
    shard, index = shard_of(folder, GATE), (folder / INDEX).read_text()
    edit_tensors(shard, lambda tensors: tensors.update({NORM: np.ones(192, "f4")}))
    (folder / INDEX).write_text(index)


def shortened(folder: Path) -> None:
    shard = shard_of(folder, EXPERT)
    os.truncate(shard, shard.stat().st_size - 8)


def halved(tensors: dict[str, np.ndarray]) -> None:
    tensors[EXPERT] = tensors[EXPERT][:96].copy()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: shard_of(folder, GATE).unlink(), ["model-00002", "1 of 5 files"]),
        (edited(EXPERT, lambda t: t.pop(EXPERT)), [EXPERT.removeprefix("language_model."), "no"]),
        (shortened, ["model-00002", "cut short"]),
        (twice, ["model-00003", NORM, "also in model-00002"]),
        (misplaced, [INDEX, NORM, "it is in model-00003"]),
        (edited(GATE, lambda t: t.update({f"{GATE}s": t.pop(GATE)})), ["unknown", f"{GATE}s"]),
        (edited(EXPERT, halved), [EXPERT, "I32 [96, 32]", "I32 [192, 32]"]),
        (
            edited(GATE, lambda t: t.update({GATE: t[GATE].astype("f4")})),
            [GATE, "F32 [4, 192]", "BF16 [4, 192]"],
        ),
        (lambda folder: (folder / "tiktoken.model").unlink(), ["tiktoken.model", "No such file"]),
        (lambda folder: (folder / INDEX).unlink(), [INDEX, "is the download complete?"]),
    ],
    ids=[
        *("shard missing", "tensor missing", "truncated", "duplicate", "index wrong", "misspelt"),
        *("shape wrong", "dtype wrong", "no tokenizer", "no index"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_one_line_before_anything_is_read(
    own, tmp_path, monkeypatch, capsys, spoil, words, cached
) -> None:
    monkeypatch.setattr(Files, "read", lambda *_: pytest.fail("a weight was read"))
    spoil(own)
    cache = ["--cache", str(tmp_path / "kept")] if cached else []
    ran = run(monkeypatch, capsys, "x", "--model", str(own), "--mode", "ar", *cache)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1), ran.err
    assert ran.err.startswith("error: ") and all(word in ran.err for word in words), ran.err
    assert not list(tmp_path.glob("kept/*.packed*"))
