"""The files of a checkpoint folder: index, headers, sizes; and the writer that makes them."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddtree_numba.model.checkpoint import INDEX, Checkpoint, read_header
from ddtree_numba.spec.numerics import bf16, widen
from golden.checkpoint_writer import write_safetensors
from tests.checkpoints import edit_tensors, write_tiny
from tests.refusals import refusal

SHARDS = [f"model-0000{n}-of-000003.safetensors" for n in (1, 2, 3)]


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Path:
    write_tiny(tmp_path / "tiny", rng)
    return tmp_path / "tiny"


def edit_index(folder: Path, edit: Callable[[dict], object]) -> None:
    content = json.loads((folder / INDEX).read_text())
    edit(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def test_files_of_the_writer_read_back_with_the_safetensors_library(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny)
    assert [path.name for path in checkpoint.files] == SHARDS
    stored = {}
    for path in checkpoint.files:
        stored |= load_file(path)
    assert stored.keys() == checkpoint.tensors.keys()
    for name, tensor in stored.items():
        entry = checkpoint.tensors[name]
        assert entry.shape == tensor.shape
        out = np.empty(tensor.shape, tensor.dtype)
        checkpoint.read(entry, out, slice(None), slice(None))
        assert out.tobytes() == tensor.tobytes()
    total = json.loads((tiny / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in stored.values())
    assert stored["language_model.model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "f4"


def test_a_layer_lies_wholly_in_one_shard(tiny: Path) -> None:
    index = json.loads((tiny / INDEX).read_text())["weight_map"]
    for layer in range(3):
        prefix = f"language_model.model.layers.{layer}."
        assert len({file for name, file in index.items() if name.startswith(prefix)}) == 1


def test_slices_of_rows_and_columns(tmp_path: Path, rng: np.random.Generator) -> None:
    values = bf16(rng.standard_normal((12, 10)))
    write_safetensors(tmp_path / "model.safetensors", {"pad": np.zeros(3, "f4"), "x": values})
    checkpoint = Checkpoint(tmp_path)
    out = np.empty((5, 3), values.dtype)
    checkpoint.read(checkpoint.tensors["x"], out, slice(2, 7), slice(4, 7))
    assert np.array_equal(widen(out), widen(values[2:7, 4:7]))


def test_l01_missing_shard(tiny: Path) -> None:
    (tiny / SHARDS[1]).unlink()
    message = refusal(lambda: Checkpoint(tiny), INDEX)
    assert "1 of 3 files are missing" in message and SHARDS[1] in message
    assert "download" in message


def test_l01_empty_folder(tmp_path: Path) -> None:
    assert "download" in refusal(lambda: Checkpoint(tmp_path), str(tmp_path))
    assert "no such folder" in refusal(lambda: Checkpoint(tmp_path / "none"), "none")


@pytest.mark.parametrize("index", [{"weight_map": {}}, {}, {"weight_map": []}])
def test_l01_index_of_nothing(tiny: Path, index: dict) -> None:
    (tiny / INDEX).write_text(json.dumps(index))
    assert "lists no tensors" in refusal(lambda: Checkpoint(tiny), INDEX)


def test_l01_index_and_shards_disagree(tiny: Path) -> None:
    norm = "language_model.model.norm.weight"
    edit_index(tiny, lambda files: files.update({norm: SHARDS[0]}))
    message = refusal(lambda: Checkpoint(tiny), INDEX)
    assert norm in message and SHARDS[0] in message and f"it is in {SHARDS[2]}" in message
    edit_index(tiny, lambda files: files.update({norm: SHARDS[2], "ghost": SHARDS[0]}))
    assert "no file has it" in refusal(lambda: Checkpoint(tiny), INDEX)
    edit_index(tiny, lambda files: [files.pop(name) for name in ("ghost", norm)])
    assert norm in refusal(lambda: Checkpoint(tiny), SHARDS[2])


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", 3])
def test_l01_index_that_points_outside_the_folder(tiny: Path, file: object) -> None:
    edit_index(tiny, lambda files: files.update({"x": file}))
    assert "not a file name" in refusal(lambda: Checkpoint(tiny), INDEX)


def test_tensor_stored_in_two_shards(tiny: Path) -> None:
    norm = "language_model.model.norm.weight"
    edit_tensors(tiny / SHARDS[0], lambda tensors: tensors.update({norm: bf16(np.ones(64))}))
    message = refusal(lambda: Checkpoint(tiny), norm)
    assert SHARDS[0] in message and SHARDS[2] in message


def file_with(path: Path, header: object, data: bytes, pad: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * max(0, pad - len(text))
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def item(start: int, stop: int, shape: object = None, dtype: str = "F32") -> dict:
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("pad", [0, 100_000])
def test_l03_good_files(tmp_path: Path, pad: int) -> None:
    header = {"__metadata__": {"a": "b"}, "b": item(8, 16), "a": item(0, 8), "none": item(16, 16)}
    path = file_with(tmp_path / "x.safetensors", header, bytes(16), pad)
    entries = read_header(path)
    assert set(entries) == {"a", "b", "none"}
    assert entries["b"].stop == path.stat().st_size


@pytest.mark.parametrize("cut", ["one byte", "half", "in the header", "seven bytes", "empty"])
def test_l03_truncated_shard(tiny: Path, cut: str) -> None:
    path = tiny / SHARDS[1]
    size = path.stat().st_size
    keep = {"one byte": size - 1, "half": size // 2, "in the header": 100}
    os.truncate(path, keep.get(cut, 7 if cut == "seven bytes" else 0))
    message = refusal(lambda: Checkpoint(tiny), SHARDS[1])
    assert str(path.stat().st_size) in message
    if cut in ("one byte", "half"):
        assert f"expected {size} bytes" in message and "cut short" in message


def test_l03_trailing_bytes(tiny: Path) -> None:
    path = tiny / SHARDS[1]
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"abc")
    message = refusal(lambda: Checkpoint(tiny), SHARDS[1])
    assert f"expected {size} bytes, found {size + 3}" in message


def test_l03_header_length_of_a_terabyte(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    assert str(1 << 40) in refusal(lambda: read_header(path), path.name)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"a": item(0, 8), "b": item(4, 12)}, "overlaps"),
        ({"a": item(0, 16), "b": item(4, 8)}, "overlaps"),
        ({"a": item(0, 8), "b": item(12, 16)}, "gap"),
        ({"a": item(4, 16)}, "gap"),
        ({"a": item(0, 16, [3])}, "needs 12 bytes"),
        ({"a": item(0, 16, [-4])}, "bad shape"),
        ({"a": item(0, 16, [4.0])}, "bad shape"),
        ({"a": item(0, 16, [4], "F5")}, "unknown dtype"),
        ({"a": {"dtype": "F32"}}, "broken safetensors header"),
        ({"a": 3}, "broken safetensors header"),
        ([1], "broken safetensors header"),
        (b'{"a": ', "broken safetensors header"),
        (b'{"a\xff": {}}', "broken safetensors header"),
        ({"a": item(0, 16, dtype=["F32"])}, "broken safetensors header"),  # type: ignore[arg-type]
    ],
)
def test_l03_headers_that_lie(tmp_path: Path, header: object, word: str) -> None:
    path = file_with(tmp_path / "x.safetensors", header, bytes(16), pad=10_000)
    message = refusal(lambda: read_header(path), path.name)
    assert word in message and len(message) < 300  # the header itself is no part of it


def test_a_folder_in_place_of_the_one_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert "nor model.safetensors in it" in refusal(lambda: Checkpoint(tmp_path), tmp_path.name)
