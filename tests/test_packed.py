"""Packed weights: equal to what was loaded, cheaper to read, never stale."""

import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree_numba.model import packed as packed_module
from ddtree_numba.model import packed_file
from ddtree_numba.model.checkpoint import INDEX, Checkpoint
from ddtree_numba.model.config import CheckpointError, load_config, load_drafter_config
from ddtree_numba.model.loader import load_drafter, load_target
from ddtree_numba.model.names import drafter_pieces, target_pieces
from ddtree_numba.model.packed_file import END, MAGIC, Writer
from ddtree_numba.model.plan import plan, total
from ddtree_numba.spec.numerics import Int4Matrix
from tests.checkpoints import edit_tensors, shard_of
from tests.kept import equal

NORM = "language_model.model.norm.weight"


@pytest.mark.parametrize("world", [1, 8])
def test_the_second_load_is_equal_and_reads_the_packed_file_alone(tiny, kept, world) -> None:
    plain = [load_target(tiny, load_config(tiny), rank, world) for rank in range(world)]
    for _ in range(2):
        assert all(equal(kept.load(tiny, r, world), plain[r]) for r in range(world))
        assert kept.notes == []
    assert kept.bytes(".safetensors") == 0 < kept.bytes(".packed")
    assert len(kept.files) == world and all(path.suffix == ".packed" for path in kept.files)


def test_arrays_of_many_blocks(tiny, kept, monkeypatch) -> None:
    monkeypatch.setattr(packed_file, "BLOCK", 1000)
    monkeypatch.setattr(packed_file, "DIRTY", 5000)  # written to the disk bit by bit
    plain = kept.load(tiny)
    assert equal(kept.load(tiny), plain) and kept.calls(".packed") > 300
    spoil(kept.files[0], "array")
    assert equal(kept.load(tiny), plain) and "is damaged" in kept.notes[0]


def test_the_drafter_too_beside_the_target(tiny, kept) -> None:
    config, folder = load_drafter_config(tiny / "drafter"), tiny / "drafter"
    plain = load_drafter(folder, config, 1, 2)
    kept.load(tiny, 1, 2)
    for _ in range(2):
        kept.read.clear()
        assert equal(load_drafter(folder, config, 1, 2, packed=kept.packed), plain)
    assert kept.calls(".safetensors") == 0 and len(kept.files) == 2


def test_a_rank_of_eight_reads_less_than_half_of_what_it_read_from_the_checkpoint(
    embedded, kept
) -> None:
    """Slices of columns and of experts lie scattered there, and are contiguous here."""
    kept.load(embedded, 3, 8)
    before = kept.bytes(".safetensors")
    kept.load(embedded, 3, 8)
    share = total(plan(load_config(embedded), tp=8).target).rank_bytes
    assert kept.bytes(".packed") == share
    assert 2 * share < before and 2 * kept.calls(".packed") < len(Checkpoint(embedded).tensors)


def test_progress_counts_the_packed_bytes(tiny, kept) -> None:
    kept.load(tiny)
    calls: list[tuple[int, int]] = []
    kept.load(tiny, progress=lambda *call: calls.append(call))
    assert calls[-1] == (kept.bytes(".packed"),) * 2


def other_index(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(content | {"metadata": {}}))


def other_norm(folder: Path) -> None:
    ones = {NORM: np.ones(64, "f4").astype("bfloat16")}
    edit_tensors(shard_of(folder, NORM), lambda tensors: tensors.update(ones))


def other_epsilon(folder: Path) -> None:
    path = folder / "config.json"
    stat = path.stat()
    path.write_text(path.read_text().replace("1e-05", "2e-05"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def other_time(folder: Path) -> None:
    os.utime(shard_of(folder, NORM), (1, 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_index, "index"),
        (other_norm, "model-00003-of-000003.safetensors"),
        (other_epsilon, "configuration"),
        (other_time, "model-00003-of-000003.safetensors"),
    ],
)
def test_a_changed_source_is_seen_named_and_packed_again(tiny, kept, change, named) -> None:
    kept.load(tiny)
    change(tiny)
    weights = kept.load(tiny)
    assert kept.notes == [f"{kept.files[0]}: made from another {named}; loading {tiny} instead"]
    assert kept.calls(".packed") == 0
    assert equal(weights, load_target(tiny, load_config(tiny)))
    assert equal(kept.load(tiny), weights)
    assert kept.notes == [] and kept.calls(".safetensors") == 0


def test_another_version_or_format_is_packed_again(tiny, kept, monkeypatch) -> None:
    kept.load(tiny)
    monkeypatch.setattr(packed_module, "_version", lambda: "0.0.0")
    kept.load(tiny)
    assert "made from another version" in kept.notes[0]
    monkeypatch.setattr(packed_module, "FORMAT", 99)
    kept.load(tiny)
    assert "made from another format" in kept.notes[0]


def test_another_cut_of_a_weight_has_another_format(tiny) -> None:
    """Or files that were packed before would be taken for parts of another shape."""
    config = load_config(tiny)
    pieces = *target_pieces(config), *drafter_pieces(load_drafter_config(tiny / "drafter"))
    cuts = sorted({(piece.field, piece.slot, piece.cut) for piece in pieces})
    assert (packed_module.FORMAT, zlib.crc32(repr(cuts).encode())) == (2, 473977947)


def test_other_fields_are_packed_again(tiny, kept, monkeypatch) -> None:
    add = Writer.add
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "add", lambda *a: None if a[1] == "norm" else add(*a))
        plain = kept.load(tiny)
    assert equal(kept.load(tiny), plain) and "holds other weights" in kept.notes[0]
    assert equal(kept.load(tiny), plain) and kept.notes == []


def test_backends_ranks_and_folders_do_not_share_files(tiny, kept, tmp_path) -> None:
    kept.load(tiny)
    kept.load(tiny, 0, 2)
    kept.load(tiny, 1, 2)
    shutil.copytree(tiny, tmp_path / "elsewhere" / "tiny")
    kept.load(tmp_path / "elsewhere" / "tiny")
    kept.packed = replace(kept.packed, backend="other")
    kept.load(tiny)
    assert kept.notes == [] and len(kept.files) == 5


def spoil(path: Path, how: str) -> None:
    size = path.stat().st_size
    if how in ("empty", "half", "last byte"):
        os.truncate(path, {"empty": 0, "half": size // 2, "last byte": size - 1}[how])
        return
    with path.open("r+b") as file:
        file.seek({"array": size // 2, "table": size - 40}[how])
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("empty", "cut short"),
        ("half", "cut short"),
        ("last byte", "cut short"),
        ("array", "is damaged at byte"),
        ("table", "its table is damaged"),
    ],
)
def test_a_damaged_file_is_named_in_a_line_and_made_again(tiny, kept, how, complaint) -> None:
    plain = kept.load(tiny)
    spoil(kept.files[0], how)
    assert equal(kept.load(tiny), plain)
    (note,) = kept.notes
    assert str(kept.files[0]) in note and complaint in note and "\n" not in note
    assert equal(kept.load(tiny), plain) and kept.notes == []


def rewrite_table(path: Path, change: Any) -> None:
    """Another table, with a checksum that is right."""
    raw = path.read_bytes()
    length = END.unpack(raw[-END.size :])[0]
    start = len(raw) - END.size - length
    text = change(json.loads(raw[start : -END.size]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(raw[:start] + text + END.pack(len(text), zlib.crc32(text), MAGIC))


def with_array(**changed: Any) -> Any:
    def change(table: dict[str, Any]) -> dict[str, Any]:
        table["rows"][0]["values"][""] |= changed
        return table

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda table: b"{",
        lambda table: b"\xff",
        lambda table: [],
        lambda table: {},
        lambda table: table | {"made_from": None},
        lambda table: table | {"rows": 1},
        lambda table: table | {"rows": [1, *table["rows"][1:]]},
        lambda table: table | {"rows": [{"field": "embed"}, *table["rows"][1:]]},
        lambda table: table | {"rows": [table["rows"][0] | {"kind": "x"}, *table["rows"][1:]]},
        lambda table: table | {"rows": [table["rows"][0] | {"kind": []}, *table["rows"][1:]]},
        lambda table: table | {"rows": [table["rows"][0] | {"values": {}}, *table["rows"][1:]]},
        with_array(crc32=[]),
        with_array(crc32=None),
        with_array(dtype="object"),
        with_array(shape=[1 << 50, 1 << 50]),
        with_array(shape=[-1], crc32=[]),
        with_array(shape=64),
        with_array(shape=[]),
        with_array(start=-1),
        with_array(start="x"),
    ],
)
def test_a_table_of_odd_content_is_a_damaged_file(tiny, kept, change) -> None:
    plain = kept.load(tiny)
    (path,) = kept.files
    rewrite_table(path, change)
    assert equal(kept.load(tiny), plain)
    assert kept.notes == [f"{path}: its table is damaged; loading {tiny} instead"]


def test_a_missing_shard_is_refused_although_its_weights_are_kept(tiny, kept) -> None:
    kept.load(tiny)
    shard_of(tiny, NORM).unlink()
    with pytest.raises(CheckpointError, match="1 of 3 files are missing"):
        kept.load(tiny)


def test_a_matrix_may_be_kept_in_another_form(tiny, kept) -> None:
    """As the cuda backend does: what `place` made of a matrix is stored, and placed again."""
    placed: list[str] = []

    def place(tensor: Any, field: str) -> Any:
        if isinstance(tensor, Int4Matrix) and tensor.shape[0] > 0:
            placed.append(field)
            return Int4Matrix(tensor.packed[::-1].copy(), tensor.scale, (-1, *tensor.shape[1:]))
        return tensor

    kept.packed = replace(kept.packed, keep=lambda tensor, made: made)
    first = kept.load(tiny, place=place)
    count = len(placed)
    assert count == 4 and equal(kept.load(tiny, place=place), first)
    assert len(placed) == count
