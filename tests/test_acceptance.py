"""What drafting yields on the embedded model, and that it yields the same over ranks."""

import pytest

from bench.acceptance import held_out_code, measure
from ddtree_numba.engine import Engine
from tests.answers import decode, sampling


def test_tokens_per_round_on_held_out_code(engine, record_property):
    """A drafter fed a wrong context, position or layer drafts little, though nothing else shows."""
    prompts = held_out_code()[::4]
    chain = measure(engine, prompts, "chain", 0)["tokens_per_round"]
    tree = measure(engine, prompts, "ddtree", 16)["tokens_per_round"]
    record_property("summary", f"tokens per round: chain {chain:.2f}, budget 16 {tree:.2f}")
    assert chain >= 3.0
    assert tree >= 1.1 * chain


@pytest.mark.parametrize("tp", [4, 8])
def test_s09_trees_decode_as_plain_decoding_does_on_many_ranks(embedded, tp):
    engine = Engine.load(embedded, backend="numpy", tp=tp, max_batch=1)
    answers = []
    for mode in ("ar", "ddtree"):
        answers += decode(engine, ["def f(x):\n"], sampling(None, 24), mode, 8)
        first, *others = (taps.tobytes() for taps in engine.ranks.taps)
        assert len(others) == tp - 1 and all(other == first for other in others)
    assert len(answers[0]) == 24 and answers[0] == answers[1]


@pytest.mark.parametrize("seed", [None, 1])
def test_s17_s34_two_ranks_decode_alike(embedded, seed):
    """Tensor parallel over threads: trees and draws agree, and so does one rank in float32."""
    prompts = ["def f(x):\n", "import os\n"]
    answers = []
    for tp, mode in ((1, "ddtree"), (2, "ddtree"), (2, "ar")):
        cut = dict(tp=tp, shard_latents=mode == "ar")  # in float32 it changes nothing either
        engine = Engine.load(embedded, backend="numpy", **cut, dtype="float32", max_batch=2)
        answers.append(decode(engine, prompts, sampling(seed, 50), mode, 8))
    assert answers[0] == answers[1] == answers[2]
