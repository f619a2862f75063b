"""What loading costs: bytes read by a rank, progress, time, resident memory."""

import json
import struct
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree_numba.model.checkpoint import BLOCK, Checkpoint, Entry
from ddtree_numba.model.config import check_pair, load_config, load_drafter_config
from ddtree_numba.model.loader import load_drafter, load_target
from ddtree_numba.model.plan import plan, total
from tests.checkpoints import flat_config, shapes, write_tiny
from tests.refusals import write

SHAPES_BYTES = 8  # a weight_shape, which every rank reads and none keeps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, np.random.default_rng(7), shards=4)
    return folder


@pytest.mark.parametrize("world", [1, 2, 8])
def test_g08_a_rank_reads_its_share_and_no_more(tiny: Path, world: int, monkeypatch) -> None:
    read: list[int] = []
    original = Checkpoint.read

    def counting(self: Checkpoint, entry: Entry, out: np.ndarray, *slices: slice) -> None:
        read.append(out.nbytes)
        original(self, entry, out, *slices)

    monkeypatch.setattr(Checkpoint, "read", counting)
    config = load_config(tiny)
    load_target(tiny, config, world - 1, world)
    part = total(plan(config, tp=world).target)
    experts = 2 * 4 * 3  # layers, experts, matrices
    assert sum(read) == part.rank_bytes + experts * SHAPES_BYTES
    assert len(read) == part.tensors


def test_g08_progress_counts_bytes_up_to_the_total(tiny: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_target(tiny, load_config(tiny), 1, 2, progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert len(set(totals)) == 1 and done[-1] == totals[0]
    assert all(a < b for a, b in pairwise(done))
    calls.clear()
    file = tiny / "drafter" / "model.safetensors"
    config = load_drafter_config(file.parent)
    load_drafter(file.parent, config, progress=lambda *call: calls.append(call))
    assert calls[-1] == (file.stat().st_size - header_bytes(file),) * 2


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + struct.unpack("<Q", file.read(8))[0]


def test_files_are_opened_once_to_check_and_once_to_read(tiny: Path, monkeypatch) -> None:
    opened: list[str] = []
    original = Path.open

    def counting(self: Path, *args: Any, **options: Any) -> Any:
        if self.suffix == ".safetensors":
            opened.append(self.name)
        return original(self, *args, **options)

    config = load_config(tiny)
    monkeypatch.setattr(Path, "open", counting)
    load_target(tiny, config)
    assert len(opened) == 2 * 4 and len(set(opened)) == 4


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


def test_g08_resident_memory_stays_at_the_largest_tensor(tmp_path: Path) -> None:
    sparse_checkpoint(tmp_path, layers=24)
    size = (tmp_path / "model.safetensors").stat().st_size
    largest = 2 * 2 * 16384 * 256  # gate and up of a layer
    peak = start = resident()

    def watch(*_: int) -> None:
        nonlocal peak
        peak = max(peak, resident())

    load_target(tmp_path, load_config(tmp_path), place=lambda *_: None, progress=watch)
    bound = 2 * largest + BLOCK + (8 << 20)
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
