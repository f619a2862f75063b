"""What loading costs: bytes read by a rank, progress, time, resident memory."""

import gc
import json
import os
import struct
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree_numba.model import reading
from ddtree_numba.model.checkpoint import Checkpoint, Entry
from ddtree_numba.model.config import check_pair, load_config, load_drafter_config
from ddtree_numba.model.loader import load_drafter, load_target
from ddtree_numba.model.plan import plan, total
from ddtree_numba.model.reading import (
    AHEAD,
    BLOCK,
    GAP,
    THREADS,
    Ahead,
    Files,
    Part,
    grouped,
    read_group,
)
from golden.checkpoint_writer import write_safetensors
from tests.checkpoints import flat_config, shapes, write_tiny
from tests.refusals import refusal, write

SHAPES_BYTES = 8  # a weight_shape, which every rank reads and none keeps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, np.random.default_rng(7), shards=4)
    return folder


@pytest.mark.parametrize("world", [1, 2, 8])
def test_g08_a_rank_takes_its_share_and_no_more(tiny: Path, world: int, monkeypatch) -> None:
    wanted: list[int] = []
    original = Checkpoint.part

    def counting(self: Checkpoint, entry: Entry, out: np.ndarray, *slices: slice) -> Part:
        wanted.append(out.nbytes)
        return original(self, entry, out, *slices)

    monkeypatch.setattr(Checkpoint, "part", counting)
    config = load_config(tiny)
    load_target(tiny, config, world - 1, world)
    part = total(plan(config, tp=world).target)
    experts = 2 * 4 * 3  # layers, experts, matrices
    assert sum(wanted) == part.rank_bytes + experts * SHAPES_BYTES
    assert len(wanted) == part.tensors


def test_neighbours_are_read_together_and_far_parts_are_skipped(tmp_path: Path) -> None:
    """Three tensors near each other are one read, a slice of rows is no more than its bytes."""
    width = 2 * GAP // 4
    stored = {"a": np.arange(9, dtype="i4"), "b": np.arange(7, dtype="i4")}
    stored |= {"far": np.arange(8 * width, dtype="i4").reshape(8, width), "z": np.arange(3, 9)}
    write_safetensors(tmp_path / "model.safetensors", stored)
    checkpoint, read = Checkpoint(tmp_path), list[int]()

    class Counted(Files):
        def read(self, path: Path, start: int, out: np.ndarray) -> None:
            read.append(out.nbytes)
            super().read(path, start, out)

    files = Counted()
    rows = {"a": slice(None), "b": slice(2, 5), "far": slice(4, 6), "z": slice(1, 4)}
    out = {name: np.empty_like(stored[name][rows[name]]) for name in rows}
    parts = [checkpoint.part(checkpoint.tensors[n], out[n], rows[n], slice(None)) for n in rows]
    groups = grouped(reversed(parts))
    assert [len(group) for group in groups] == [2, 1, 1]
    assert sum(read_group(files, group) for group in groups) == sum(a.nbytes for a in out.values())
    assert read == [4 * (9 + 5), out["far"].nbytes, out["z"].nbytes]
    assert all(np.array_equal(out[name], stored[name][rows[name]]) for name in rows)


def test_a_large_tensor_is_several_reads(tmp_path: Path) -> None:
    values = np.arange(5 * BLOCK // 8, dtype="i4").reshape(-1, 64)
    write_safetensors(tmp_path / "model.safetensors", {"x": values})
    checkpoint = Checkpoint(tmp_path)
    out = np.empty((len(values), 16), "i4")
    part = checkpoint.part(checkpoint.tensors["x"], out, slice(None), slice(16, 32))
    assert len(grouped([part])) == 3
    checkpoint.read(checkpoint.tensors["x"], out, slice(None), slice(16, 32))
    assert np.array_equal(out, values[:, 16:32])


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x": np.arange(64, dtype="i4")})
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 100)
    entry, out = checkpoint.tensors["x"], np.empty(64, "i4")
    read = partial(checkpoint.read, entry, out, slice(None), slice(None))
    assert "ends at byte 100" in refusal(read, "model.safetensors")


def test_a_disk_that_fails_is_named_with_its_file(tmp_path: Path, monkeypatch) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x": np.arange(64, dtype="i4")})
    checkpoint, out = Checkpoint(tmp_path), np.empty(64, "i4")

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    read = partial(checkpoint.read, checkpoint.tensors["x"], out, slice(None), slice(None))
    assert "Input/output error" in refusal(read, "model.safetensors")


def test_arrays_ahead_stop_at_their_bytes() -> None:
    begun: list[str] = []

    def begin(name: str) -> tuple[str, list]:
        begun.append(name)
        return name, []

    ahead = Ahead(dict.fromkeys("abcdef", AHEAD // 2), begin, None)
    assert ahead.take("a") == "a" and begun == list("abc")
    assert ahead.take("b") == "b" and begun == list("abcd")
    ahead.close()
    with pytest.raises(AssertionError, match="nobody took"):
        ahead.finish()


def test_g08_progress_counts_bytes_up_to_the_total(tiny: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_target(tiny, load_config(tiny), 1, 2, progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert len(set(totals)) == 1 and done[-1] == totals[0]
    assert all(a <= b for a, b in pairwise(done))
    calls.clear()
    file = tiny / "drafter" / "model.safetensors"
    config = load_drafter_config(file.parent)
    load_drafter(file.parent, config, progress=lambda *call: calls.append(call))
    assert calls[-1] == (file.stat().st_size - header_bytes(file),) * 2


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + struct.unpack("<Q", file.read(8))[0]


def test_files_are_opened_once_and_closed(tiny: Path, monkeypatch) -> None:
    opened: list[str] = []
    original = os.open

    def counting(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(".safetensors"):
            opened.append(Path(path).name)
        return original(path, *args, **options)

    config = load_config(tiny)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", counting)
    load_target(tiny, config)
    assert len(opened) == len(set(opened)) == 4
    assert len(os.listdir("/proc/self/fd")) == before


def resident() -> int:
    """Bytes of this process in memory, pages of mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def sparse_checkpoint(folder: Path, layers: int) -> None:
    """A target of dense layers in one file of zeros that takes no room on disk."""
    config = flat_config() | {
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "hidden_size": 256,
        "intermediate_size": 16384,
        "vocab_size": 32768,
    }
    write(folder, config)
    header: dict[str, Any] = {}
    position = 0
    for name, shape in shapes(config).items():
        size = 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)


def test_g08_resident_memory_stays_at_the_largest_tensor(tmp_path: Path, monkeypatch) -> None:
    sparse_checkpoint(tmp_path, layers=32)
    ahead = 1 << 26
    monkeypatch.setattr(reading, "AHEAD", ahead)
    size = (tmp_path / "model.safetensors").stat().st_size
    largest = 2 * 2 * 16384 * 256  # gate and up of a layer
    peak = start = resident()

    def watch(*_: int) -> None:
        nonlocal peak
        peak = max(peak, resident())

    load_target(tmp_path, load_config(tmp_path), place=lambda *_: None, progress=watch)
    bound = largest + ahead + THREADS * BLOCK + (8 << 20)
    assert size > 6 * bound
    assert peak - start < bound, (peak - start, bound)


def test_the_embedded_model_loads_in_well_below_a_second(embedded: Path) -> None:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        config, drafter = load_config(embedded), load_drafter_config(embedded / "drafter")
        check_pair(config, drafter)
        load_target(embedded, config)
        load_drafter(embedded / "drafter", drafter)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.8, times


def test_the_embedded_model_can_be_cut_into_8(embedded: Path) -> None:
    drafter = load_drafter_config(embedded / "drafter")
    answer = plan(load_config(embedded), drafter, tp=8)
    assert answer.tp_sizes == (1, 2, 4, 8)
    assert total(answer.target).bytes + total(answer.drafter).bytes < 15.5e6
