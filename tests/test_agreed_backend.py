"""What ranks that are processes run on: all on GPUs of their own, or none."""

from types import SimpleNamespace

import pytest

from ddtree_numba import backends, led


@pytest.fixture
def agreed(monkeypatch):
    """agreed(gpus, backend): what ranks with these GPUs ("": numpy) come to, and the notes."""

    def run(gpus: list[str], backend: str = "auto") -> tuple[str, list[str]]:
        notes: list[str] = []
        monkeypatch.setattr(led, "name_of", lambda *_: "cuda" if gpus[0] else "numpy")
        monkeypatch.setattr(led, "gpu_of", lambda _: gpus[0])
        comm = SimpleNamespace(gather=lambda own: [gpu.encode() for gpu in gpus])
        place = SimpleNamespace(local_rank=0)
        group = SimpleNamespace(comm=comm, place=place, world=len(gpus))
        return led.agreed_backend(group, backend, "bfloat16", notes.append), notes

    return run


def test_every_rank_has_a_gpu_of_its_own(agreed):
    assert agreed(["m 0", "m 1"]) == ("cuda", [])
    assert agreed(["m 0", "n 0"], "cuda") == ("cuda", [])  # of two machines


def test_ranks_share_a_gpu_only_where_they_may(agreed, monkeypatch):
    note = "2 ranks, 1 GPU between them"
    assert agreed(["m 0", "m 0"]) == ("numpy", [f"{note}; numpy is used instead"])
    with pytest.raises(ValueError, match=f"backend 'cuda': {note}"):
        agreed(["m 0", "m 0"], "cuda")
    monkeypatch.setenv("DDTREE_NUMBA_SHARED_GPUS", "1")
    assert agreed(["m 0", "m 0"]) == ("cuda", [])


def test_one_rank_without_a_gpu_brings_all_to_numpy(agreed):
    assert agreed(["m 0", ""])[0] == "numpy"
    assert agreed(["", ""]) == ("numpy", [])


def test_more_ranks_than_the_sums_take(agreed):
    pytest.importorskip("numba.cuda")
    from ddtree_numba.kernels.all_reduce_call import MOST_RANKS

    assert backends.MOST_GPUS == MOST_RANKS
    gpus = [f"m {i}" for i in range(17)]
    assert agreed(gpus)[1] == ["17 ranks, 16 at most; numpy is used instead"]
    with pytest.raises(ValueError, match="backend 'cuda': 17 ranks, 16 at most"):
        agreed(gpus, "cuda")


def test_a_rank_gets_the_gpu_of_its_number_or_the_only_one(monkeypatch):
    pytest.importorskip("numba.cuda")
    monkeypatch.setattr(backends, "machine", lambda: "m")
    monkeypatch.setattr("ddtree_numba.kernels.driver.bus_id", lambda device: f"bus {device}")
    for visible, device in ((8, 3), (1, 0)):
        monkeypatch.setattr(backends, "visible_gpus", lambda visible=visible: visible)
        assert backends.gpu_of(3) == f"m bus {device}"
