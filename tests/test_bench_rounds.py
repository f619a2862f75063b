"""The bench of rounds, with numpy in place of the device and a made-up trace."""

from bench import round_trace, rounds
from tests.scripted import count_up, scripted_engine, some_right
from tests.test_graphs import ahead


def test_rates_and_equal_answers_of_every_mode(monkeypatch):
    monkeypatch.setattr(rounds, "TOKENS", 24)
    monkeypatch.setattr(round_trace, "record", lambda call: [])
    engine = ahead(scripted_engine(count_up, some_right))
    engine.ranks.ops.round_seconds = 3e-6
    rows = rounds.measure(engine, ["a", "b", "c"])
    assert [row["equal"] for row in rows] == [3] * len(rounds.MODES)
    assert rows[0]["tokens_per_round"] == 1.0 < rows[3]["tokens_per_round"]
    line = rounds.table(rows)[2]
    assert line.startswith("| ar |  | ") and line.endswith(" | 1.00 x | 1.00 | 3 |  |  |  |  |")


def event(cat, name, ts, dur, number=None):
    return dict(cat=cat, name=name, ts=ts, dur=dur, args=dict(correlation=number))


def test_a_trace_tells_idle_time_and_waits():
    events = [
        event("cuda_runtime", "cudaGraphLaunch", 0, 5, 1),
        event("kernel", "a", 10, 20, 1),
        event("kernel", "b", 25, 15, 1),
        event("cuda_runtime", "cudaGraphLaunch", 20, 5, 2),
        event("gpu_memcpy", "copy", 41, 1, 7),
        event("cuda_runtime", "cudaEventSynchronize", 26, 16, 8),
        event("kernel", "a", 45, 20, 2),
        event("cuda_runtime", "cudaGraphLaunch", 50, 9, 3),
        event("cuda_runtime", "cudaStreamSynchronize", 55, 1, 9),
        event("kernel", "a", 60, 9, 3),
    ]
    found = round_trace.rounds(events)
    assert found["graphs"] == 3 and found["idle"] == 1.5  # 3 behind the copy, and 0: it had begun
    assert found["waits"] == 1 and found["between"] == 0.5
    assert found["names"] == ["cudaEventSynchronize", "cudaStreamSynchronize"]
    assert round_trace.rounds([])["graphs"] == 0
    assert round_trace.rounds([])["waits"] is None  # nothing was watched
