"""Packed weights of the cuda backend: experts are stored as records, and need no packing again."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from ddtree_numba.kernels import moe_records
from ddtree_numba.kernels.moe_records import Records
from ddtree_numba.model.config import load_config
from ddtree_numba.model.cuda_backend import CudaBackend
from ddtree_numba.model.loader import load_target
from ddtree_numba.model.packed import Packed
from tests.checkpoints import write_tiny
from tests.expert_records import packed as packed_records
from tests.leaves import leaves, same


class OnHost(CudaBackend):
    """`place` and `keep` of the backend with host arrays for device arrays."""

    def __init__(self) -> None: ...

    def active(self, pool: Any = None) -> Any:
        return nullcontext()

    def array(self, host: Any) -> Any:
        return host

    def host(self, array: Any) -> Any:
        return array

    def empty(self, shape: Any, dtype: Any = np.uint16) -> Any:
        return np.empty(shape, dtype)

    def full(self, shape: Any, value: int) -> Any:
        return np.full(shape, value, np.int32)


@pytest.mark.parametrize("world", [1, 8])
def test_records_are_packed_once(tmp_path, rng, monkeypatch, world) -> None:
    write_tiny(tmp_path / "tiny", rng)
    config, ops, notes = load_config(tmp_path / "tiny"), OnHost(), list[str]()
    kept = Packed(tmp_path / "kept", ops.name, ops.keep, notes.append)

    def load() -> Any:
        return load_target(
            tmp_path / "tiny", config, world - 1, world, place=ops.place, packed=kept
        )

    first = load()
    monkeypatch.setattr(moe_records, "pack", lambda *_, **__: pytest.fail("packed again"))
    second = load()
    assert notes == [] and all(map(same, leaves(first), leaves(second)))
    plain = load_target(
        tmp_path / "tiny", config, world - 1, world, place=lambda tensor, field: tensor
    )
    monkeypatch.undo()
    for layer in (1, 2):
        for name in ("gate_up", "down"):
            matrix, records = (getattr(w.layers[layer].mlp, name) for w in (plain, second))
            expected = packed_records(matrix, name == "gate_up")
            assert isinstance(records, Records) and records.gated == (name == "gate_up")
            assert records.shape == expected.shape and same(records.words, expected.words)
