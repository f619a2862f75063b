"""Step times that are kept from run to run."""

import errno

import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba import kept_times
from ddtree_numba.budget import StepTimes
from ddtree_numba.sampling import SamplingParams
from tests.scripted import count_up, scripted_engine, some_right
from tests.test_graphs import ahead

TIMES = StepTimes(0.5, (1, 2, 65), (1.0, 1.25, 3.0))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DDTREE_NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_times_come_back_as_they_were():
    path = kept_times.place("a GPU", dict(layers=3))
    assert kept_times.load(path) is None
    kept_times.store(path, TIMES)
    assert kept_times.load(path) == TIMES and len(list(path.parent.iterdir())) == 1


def test_another_machine_model_or_kernel_has_other_times(monkeypatch, tmp_path):
    paths = {
        kept_times.place("a GPU", 1),
        kept_times.place("another", 1),
        kept_times.place("a GPU", 2),
    }
    monkeypatch.setattr(kept_times, "KERNELS", tmp_path)
    assert len(paths | {kept_times.place("a GPU", 1)}) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "x",
        '{"draft": 1, "widths": [1], "verify": [1]}',
        '{"draft": 1, "widths": [1, 2]}',
        '{"draft": 1, "widths": [1, 1], "verify": [1, 2]}',
        '{"draft": NaN, "widths": [1, 2], "verify": [1, 2]}',
        '{"draft": 1, "widths": [1, 2], "verify": [1, 1e999]}',
        '{"draft": 1, "widths": [1, 2], "verify": [0, 1]}',
        '{"draft": 1, "widths": [1, Infinity], "verify": [1, 2]}',
        f'{{"draft": 1{400 * "0"}, "widths": [1, 2], "verify": [1, 2]}}',
        "[" * 100_000,
    ],
)
def test_what_cannot_be_read_was_not_measured(folder, text):
    path = kept_times.place("a GPU")
    folder.mkdir()
    path.write_text(text)
    assert kept_times.load(path) is None


def test_a_folder_that_cannot_be_written_costs_nothing(folder):
    folder.write_text("a file")
    kept_times.store(kept_times.place("a GPU"), TIMES)
    assert kept_times.load(kept_times.place("a GPU")) is None


def test_times_of_ranks_that_failed_meanwhile_are_not_kept(folder):
    def judge(faults):
        raise ZeroDivisionError

    engine = ahead(scripted_engine(count_up, some_right))
    engine.rounds.player.machine = "a GPU"
    engine.ranks.judge = judge
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.step_times()
    assert not folder.exists()


def test_a_full_disk_leaves_no_half_file(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_times.json, "dumps", full)
    kept_times.store(kept_times.place("a GPU"), TIMES)
    assert list(folder.iterdir()) == []


def test_an_engine_measures_once_a_machine():
    measured = []
    for machine in ("one GPU", "one GPU", "another GPU"):
        engine = ahead(scripted_engine(count_up, some_right))
        engine.rounds.player.machine = machine
        step_times = engine.rounds.step_times
        engine.rounds.step_times = lambda slot, real=step_times: measured.append(slot) or real(slot)
        assert list(engine.generate([[30]], SamplingParams(max_new_tokens=9), "ddtree", "auto"))
    assert len(measured) == 2
