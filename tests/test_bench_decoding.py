"""The bench that decodes by ranks on GPUs, as far as it goes without them."""

import sys

import pytest

pytest.importorskip("numba.cuda")

from bench import decoding, multi_gpu


@pytest.fixture
def on_numpy(monkeypatch):
    """The same commands, with ranks that need no GPU."""

    def command(world, *more):
        shared = "--backend", "numpy", "--ranks", "processes", "--tp", str(world), "--ignore-eos"
        return [sys.executable, "-m", "ddtree_numba.generate", *shared, *more]

    monkeypatch.setattr(decoding, "command", command)


def test_a_run_gives_every_prompts_tokens(on_numpy, golden):
    lines = decoding.golden()[:2]
    prompts = [line["prompt_ids"] for line in lines]
    run = decoding.decode(2, prompts, 6, decoding.RUNS["ddtree 16, batch 1"][0], {})
    assert [len(tokens) for tokens in run["tokens"]] == [6, 6] and run["rounds"] < 12
    assert run["tokens_per_second"] > 0
    assert decoding.against_golden(run["tokens"], lines)["right"]
    with pytest.raises(RuntimeError, match="--top-k must be"):
        decoding.decode(2, prompts, 6, ("--temperature", "1", "--top-k", "-1"), {})


def test_a_killed_rank_ends_all(on_numpy, monkeypatch):
    monkeypatch.setattr(decoding, "held_by", lambda ranks: [])
    monkeypatch.setattr(decoding, "DOOMED", 4)
    end = decoding.killed(2)
    assert end["code"] == 1 and end["said"] == ["error: rank 1 was killed by SIGKILL"]
    assert end["seconds"] < 10


def test_a_run_that_ends_before_a_rank_is_killed_is_named(on_numpy, monkeypatch):
    broken = decoding.command
    monkeypatch.setattr(decoding, "command", lambda world, *more: broken(3, *more))
    with pytest.raises(RuntimeError, match="nothing was decoded: error: --tp 3"):
        decoding.killed(2)


def test_answers_may_leave_the_golden_ones_where_the_lead_is_small():
    lines = [dict(tokens=[1, 2, 3], gaps=[9.0, 0.2, 9.0])]
    assert decoding.against_golden([[1, 2, 3]], lines) == dict(
        answers=1, left=0, largest_lead=0.0, right=True
    )
    assert decoding.against_golden([[1, 5, 6]], lines)["largest_lead"] == 0.2
    assert not decoding.against_golden([[7, 2, 3]], lines)["right"]


def test_what_went_wrong_is_named():
    fine = dict(self_test=[], soak=dict(wrong=0, failure=None), stopped=dict(failure="late"))
    bad = dict(self_test=["x"], soak=dict(wrong=3, failure=None), stopped={})
    assert multi_gpu.faults(dict(ranks=[fine, fine], decoding=dict(wrong=[]))) == []
    assert multi_gpu.faults(dict(ranks=[fine, bad], decoding=dict(wrong=["soak"]))) == [
        "rank 1: self-test",
        "rank 1: soak",
        "soak",
    ]
    assert multi_gpu.faults(dict(failed=dict(step="no memory"))) == ["step: no memory"]
    deaf = fine | dict(stopped=dict(failure=None))
    assert multi_gpu.faults(dict(ranks=[deaf])) == ["a rank that stopped was not noticed"]
