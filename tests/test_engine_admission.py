"""Requests around a scripted model: the context limit, pages, admission, cancelling, refusals."""

import threading

import numpy as np
import pytest

from ddtree_numba.budget import StepTimes
from ddtree_numba.sampling import SamplingParams
from ddtree_numba.spec.draft_topk import draft_topk
from tests.answers import decode
from tests.scripted import answer, count_up, right, scripted_engine, some_right, wrong


@pytest.mark.parametrize("length", [47, 61, 62, 63, 64, 65, 1000])
def test_s26_prompt_near_the_context_limit(length: int):
    engine = scripted_engine(count_up, lambda p: right(p, 15), depth=15, context=64)
    prompt = [30 + i % 100 for i in range(length)]
    params = SamplingParams(max_new_tokens=500)
    got = answer(engine, prompt, params, budget=32)
    if length >= 64:
        assert got.reason == "error" and str(length) in got.error and "64" in got.error
        return
    assert (len(prompt) + len(got.ids), got.reason) == (64, "length")
    assert got.ids == answer(engine, prompt, params, "ar").ids


def test_s28_pages_come_back_after_every_request():
    engine = scripted_engine(count_up, wrong, context=128, max_batch=2)
    free = engine.pages.free_pages
    for _ in range(100):
        answer(engine, [30, 31, 32], SamplingParams(max_new_tokens=3))
        assert engine.pages.free_pages == free


def test_s28_pages_come_back_after_an_error_and_an_abandoned_answer():
    def broken(prefix):
        if len(prefix) > 5:
            raise RuntimeError("planted")
        return count_up(prefix)

    engine = scripted_engine(broken, wrong)
    free = engine.pages.free_pages
    with pytest.raises(RuntimeError, match="planted"):
        answer(engine, [30, 31, 32], SamplingParams(max_new_tokens=30))
    assert engine.pages.free_pages == free
    abandoned = engine.generate([[30]], SamplingParams(max_new_tokens=30), "ar")
    next(abandoned)
    assert engine.pages.free_pages < free
    abandoned.close()
    assert engine.pages.free_pages == free


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_s29_rounds_across_page_edges(length: int):
    engine = scripted_engine(count_up, some_right)
    prompt = [30 + i % 150 for i in range(length)]
    params = SamplingParams(max_new_tokens=150)
    plain = answer(engine, prompt, params, "ar").ids
    for mode, budget in (("chain", 0), ("ddtree", 7), ("ddtree", 65)):
        assert answer(engine, prompt, params, mode, budget).ids == plain


def test_more_prompts_than_slots_join_and_leave():
    engine = scripted_engine(count_up, some_right, max_batch=3)
    prompts = [[30 + i] * (1 + 9 * i) for i in range(11)]
    limits = [SamplingParams(max_new_tokens=1 + 7 * (i % 5)) for i in range(11)]
    together = decode(engine, prompts, limits, "ddtree", 16)
    alone = [answer(engine, p, q, "ar").ids for p, q in zip(prompts, limits, strict=True)]
    assert together == alone


def test_prompts_wait_for_slots_that_another_generator_has():
    engine, params = scripted_engine(count_up, some_right, max_batch=3), SamplingParams()
    other = engine.generate([[30], [31]], params, "ar")
    next(other)
    ends = [one.finish_reason for one in engine.generate([[40], [41], [42]], params, "ar")]
    assert ends.count("length") == 3
    next(other)
    third = engine.generate([[32]], params, "ar")
    next(third)
    with pytest.raises(ValueError, match="every slot is taken"):
        next(engine.generate([[33]], params, "ar"))


def test_an_unusable_prompt_does_not_stop_the_others():
    engine = scripted_engine(count_up, right)
    increments = list(engine.generate([[], [30], [999]], SamplingParams(max_new_tokens=2)))
    errors = {one.index: one.error for one in increments if one.finish_reason == "error"}
    assert errors == {
        0: "the prompt is empty: give at least one token",
        2: "token id 999 lies outside the vocabulary of 256",
    }
    assert [one.finish_reason for one in increments if one.index == 1][-1] == "length"


def test_cancel_ends_after_the_current_round():
    cancel = threading.Event()
    engine = scripted_engine(count_up, right)
    reasons = []
    for one in engine.generate([[30]], SamplingParams(max_new_tokens=99), cancel=cancel):
        cancel.set()
        reasons.append(one.finish_reason)
    assert reasons == [None, "cancelled"]


@pytest.mark.parametrize(
    ("mode", "budget", "message"),
    [
        ("beam", 8, "mode must be one of"),
        ("ddtree", -1, "budget must be"),
        ("ddtree", 257, "budget must be"),
        ("ddtree", "all", "budget must be"),
    ],
)
def test_unknown_modes_and_budgets_are_refused(mode: str, budget, message: str):
    engine = scripted_engine(count_up, right)
    with pytest.raises(ValueError, match=message):
        engine.generate([[30]], SamplingParams(), mode, budget)


def test_a_mode_that_drafts_needs_a_drafter():
    engine = scripted_engine(count_up, right)
    engine.drafter_config = None
    with pytest.raises(ValueError, match="needs a drafter"):
        engine.generate([[30]], SamplingParams())
    assert len(answer(engine, [30], SamplingParams(max_new_tokens=5), "ar").ids) == 5


def test_chain_mode_is_the_greedy_chain():
    """A tree of as many nodes may branch; the chain never does."""
    close = np.zeros(256)
    close[[40, 41]] = 3.0, 2.9
    engine = scripted_engine(lambda p: 40, lambda p: [close] * 7)
    (one, *_) = engine.generate([[30]], SamplingParams(max_new_tokens=99), "chain")
    best, _ = draft_topk(np.float32(close)[None, None], 1)
    assert one.round.parents.tolist() == [-1, *range(7)]
    assert one.round.tokens[1:].tolist() == [int(best[0, 0, 0])] * 7
    (one, *_) = engine.generate([[30]], SamplingParams(max_new_tokens=99), "ddtree", 7)
    assert one.round.parents.tolist() != [-1, *range(7)]


def test_g08_a_long_prompt_tells_how_far_it_is():
    engine, told = scripted_engine(count_up, right, context=2048), []
    for length in (2, 257, 258, 700):
        told.append([])
        prompt = [30 + i % 100 for i in range(length)]
        params, tell = SamplingParams(max_new_tokens=2), lambda *done: told[-1].append(done)
        assert list(engine.generate([prompt], params, "ar", progress=tell))
    assert told == [[], [], [(256, 257), (257, 257)], [(256, 699), (512, 699), (699, 699)]]


def test_c07_cancel_stops_a_long_prefill_between_chunks():
    cancel = threading.Event()
    engine = scripted_engine(count_up, right, context=2048)
    forward, chunks = engine.ranks.forward, []

    def cancelling(batch, with_taps):
        chunks.append(batch.tokens.shape[1])
        cancel.set()
        forward(batch, with_taps)

    engine.ranks.forward = cancelling
    free = engine.pages.free_pages
    params = SamplingParams(max_new_tokens=9)
    (only,) = engine.generate([[30] * 1500], params, "chain", cancel=cancel)
    assert (only.finish_reason, only.token_ids, chunks) == ("cancelled", [], [256])
    assert engine.pages.free_pages == free


def test_cancel_gives_waiting_prompts_an_end_too():
    cancel = threading.Event()
    engine = scripted_engine(count_up, right, max_batch=2)
    ends = {}
    for one in engine.generate([[30]] * 5, SamplingParams(max_new_tokens=99), cancel=cancel):
        cancel.set()
        if one.finish_reason:
            ends[one.index] = one.finish_reason
    assert ends == dict.fromkeys(range(5), "cancelled")


def test_arguments_that_mean_something_else_are_refused():
    engine = scripted_engine(count_up, right)
    for prompts in ("abc", [5, 6]):
        with pytest.raises(TypeError, match="prompts must be a list"):
            engine.generate(prompts, SamplingParams())
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        engine.generate([[30], [31]], [SamplingParams()])
    with pytest.raises(ValueError, match="budget must be"):
        engine.generate([[30]], SamplingParams(), budget=True)
    with pytest.raises(ValueError, match="max_batch must be 1 .. 255"):
        scripted_engine(count_up, right, max_batch=0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.logits([30], [999], [0])
    with pytest.raises(ValueError, match="2 tokens but 1 parents"):
        engine.logits([30], [31, 32], [0])


@pytest.mark.parametrize(
    "wrong_value",
    [
        {"max_new_tokens": 2.5},
        {"max_new_tokens": -1},
        {"seed": 1.5},
        {"seed": 2**64},
        {"stop": ("",)},
        {"temperature": -1.0},
    ],
)
def test_unusable_sampling_parameters_cannot_be_made(wrong_value: dict):
    with pytest.raises(ValueError, match=next(iter(wrong_value))):
        SamplingParams(**wrong_value)


def test_one_stop_string_need_not_be_a_list():
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)


@pytest.mark.parametrize(("budget", "size"), [(0, 1), (8, 9), (32, 33), ("auto", 65)])
def test_a_budget_is_used_in_full_where_rows_are_free(budget, size: int):
    engine = scripted_engine(count_up, right)
    engine._times = StepTimes(0.0, (1, 65), (1.0, 1.0))
    (one, *_) = engine.generate([[30]], SamplingParams(max_new_tokens=99), "ddtree", budget)
    assert one.round.size == size


def test_s26_no_node_is_deeper_than_the_room_left():
    engine = scripted_engine(count_up, right, context=64)
    params = SamplingParams(max_new_tokens=20)
    emitted, length = 0, 50
    for one in engine.generate([[30] * length], params, "ddtree", 32):
        depths = [0]
        for parent in one.round.parents[1:]:
            depths.append(depths[parent] + 1)
        assert max(depths) == min(7, 20 - emitted - 1, 64 - length - emitted - 1)
        emitted += len(one.token_ids)


@pytest.mark.parametrize("mode", ["ddtree", "chain"])
def test_s23_a_block_of_the_root_alone_decodes_plainly(mode: str):
    def never(prefix):
        raise AssertionError("nothing can be drafted")

    engine = scripted_engine(count_up, never, depth=0)
    params = SamplingParams(max_new_tokens=9)
    assert answer(engine, [30], params, mode, "auto").rounds == [1] * 9
