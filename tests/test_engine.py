"""The decode loop around a scripted model: limits, stops, statistics, pages, admission."""

import threading

import numpy as np
import pytest

from ddtree_numba.sampling import SamplingParams
from ddtree_numba.spec.draft_topk import draft_topk
from tests.scripted import answer, scripted_engine


def following(*run: int):
    """A model that continues the prompt (7,) with `run`, and then with 1."""

    def target(prefix: tuple[int, ...]) -> int:
        made = prefix[1:]
        known = len(made) < len(run) and made == run[: len(made)]
        return run[len(made)] if known else 1

    return target


def count_up(prefix: tuple[int, ...]) -> int:
    return (prefix[-1] + 1) % 200 + 20


def right(prefix: tuple[int, ...], depth: int = 7) -> list[int]:
    """A drafter that is always right about `count_up`."""
    guesses = list(prefix[-1:])
    for _ in range(depth):
        guesses.append(count_up(tuple(guesses)))
    return guesses[1:]


def wrong(prefix: tuple[int, ...], depth: int = 7) -> list[int]:
    return [5] * depth


def some_right(prefix: tuple[int, ...]) -> list[int]:
    """Right for as many tokens as the prefix's sum says."""
    guesses = right(prefix)
    return guesses[: sum(prefix) % 8] + wrong(prefix)[sum(prefix) % 8 :]


def test_s01_eos_inside_an_accepted_path():
    drafts = lambda prefix: [11, 2, 13, 14, 5, 5, 5]  # noqa: E731
    engine = scripted_engine(following(11, 2, 13, 14, 9), drafts, eos=(2,))
    got = answer(engine, [7], SamplingParams(max_new_tokens=50))
    assert (got.ids, got.reason) == ([11, 2], "stop")
    assert got.stats.completion_tokens == 2


def test_s01_a_rejected_draft_of_eos_has_no_effect():
    drafts = lambda prefix: [11, 2, 2, 2, 2, 2, 2]  # noqa: E731
    engine = scripted_engine(following(11, 5, 6, 7), drafts, eos=(2,))
    got = answer(engine, [7], SamplingParams(max_new_tokens=4))
    assert (got.ids, got.reason) == ([11, 5, 6, 7], "length")


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 15, 16, 17, 18, 33])
@pytest.mark.parametrize("mode", ["ddtree", "chain", "ar"])
def test_s02_exact_token_limit(limit: int, mode: str):
    def draft(prefix):
        return right(prefix, 15)

    engine = scripted_engine(count_up, draft, depth=15)
    long = answer(engine, [30], SamplingParams(max_new_tokens=40), mode, 64)
    got = answer(engine, [30], SamplingParams(max_new_tokens=limit), mode, 64)
    assert got.ids == long.ids[:limit] and len(got.ids) == limit
    assert got.reason == "length"


def test_s02_limit_zero_never_touches_the_model():
    def never(prefix):
        raise AssertionError("the model was called")

    engine = scripted_engine(never, never)
    assert answer(engine, [1, 2, 3], SamplingParams(max_new_tokens=0)).ids == []


@pytest.mark.parametrize(
    ("cap", "ids", "reason"),
    [(5, [10, 11, 3], "stop"), (2, [10, 11], "length"), (3, [10, 11, 3], "stop")],
)
@pytest.mark.parametrize("mode", ["ddtree", "ar"])
def test_s03_the_earliest_end_wins(cap: int, ids: list[int], reason: str, mode: str):
    run = (10, 11, 3, 20, 21, 22)
    engine = scripted_engine(following(*run), lambda p: [*run, 1], eos=(3,))
    got = answer(engine, [7], SamplingParams(max_new_tokens=cap), mode)
    assert (got.ids, got.reason) == (ids, reason)


def test_s05_ids_and_counts_end_with_the_stop_string():
    run = tuple(map(ord, "aaabb"))
    engine = scripted_engine(following(*run), lambda p: [*run, 1, 1])
    got = answer(engine, [7], SamplingParams(max_new_tokens=9, stop=("aaa",)))
    assert (got.text, got.ids, got.reason) == ("", list(run[:3]), "stop")
    assert got.stats.completion_tokens == 3


def test_s06_tokens_per_round_counts_what_was_emitted():
    run = (10, 11, 12, 13, 14, 15, 16, 2, 18, 19)
    steps = {1: [10, 11, 12, 13, 99, 99, 99], 6: [15, 16, 2, 18, 19, 99, 99]}
    engine = scripted_engine(following(*run), lambda p: steps[len(p)], eos=(2,))
    got = answer(engine, [7], SamplingParams(max_new_tokens=50), budget=7)
    assert got.rounds == [5, 3]
    assert got.stats.tokens_per_round == 4.0 and got.stats.rounds == 2


@pytest.mark.parametrize("limit", [0, 1])
def test_g06_rates_are_undefined_below_two_tokens(limit: int):
    engine = scripted_engine(count_up, right)
    stats = answer(engine, [7], SamplingParams(max_new_tokens=limit)).stats
    assert stats.tokens_per_second is None
    assert stats.tokens_per_round == (1.0 if limit else None)


def test_s07_equal_maxima_take_the_lowest_id_whatever_the_sibling_order():
    tied = np.array([1, 3, 3, 0])
    siblings = np.array([0, 8, 8.5, 0])  # id 2 is the likelier draft
    for mode in ("ddtree", "chain", "ar"):
        engine = scripted_engine(lambda p: tied, lambda p: [siblings] * 7, vocab=4)
        got = answer(engine, [0], SamplingParams(max_new_tokens=5), mode, 8)
        assert got.ids == [1] * 5


@pytest.mark.parametrize("accepted", range(8))
def test_s10_both_caches_hold_all_but_the_anchor(accepted: int):
    """Scripted prefixes are read back from the caches: a rewind off by one changes the answer."""
    prefixes: list[int] = []

    def draft(prefix):
        prefixes.append(len(prefix))
        return right(prefix)[:accepted] + [5] * (7 - accepted)

    engine = scripted_engine(count_up, draft)
    got = answer(engine, [30, 31, 32], SamplingParams(max_new_tokens=60), "chain")
    assert got.ids == answer(engine, [30, 31, 32], SamplingParams(max_new_tokens=60), "ar").ids
    assert prefixes == [3 + (accepted + 1) * i for i in range(len(prefixes))]
    assert set(got.rounds[:-1]) == {accepted + 1}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_s12_a_non_finite_row_ends_the_request_by_name(bad: float):
    def target(prefix):
        logits = np.zeros(256)
        logits[count_up(prefix)] = bad if len(prefix) == 6 else 9
        return logits

    engine = scripted_engine(target, right)
    for mode in ("ddtree", "ar"):
        got = answer(engine, [30, 31], SamplingParams(max_new_tokens=20), mode)
        assert got.reason == "error" and len(got.ids) == 4
        assert got.error.startswith("non-finite logits for position 6: round ")
        assert engine.pages.free_pages == 4 * 8


def test_s12_off_the_accepted_path_it_does_not_matter():
    def target(prefix):
        return count_up(prefix) if 5 not in prefix else np.full(256, np.nan)

    engine = scripted_engine(target, wrong)
    got = answer(engine, [30], SamplingParams(max_new_tokens=10))
    assert got.reason == "length" and len(got.ids) == 10


def test_s17_same_seed_same_ids_wherever_it_stands():
    flat = np.zeros(256)
    engine = scripted_engine(lambda p: flat, wrong)

    def sample(seed: int | None) -> SamplingParams:
        return SamplingParams(temperature=1.0, max_new_tokens=20, seed=seed)

    first = answer(engine, [1, 2, 3], sample(1))
    assert first.ids == answer(engine, [1, 2, 3], sample(1), "ar").ids
    batch: list[list[int]] = [[], [], []]
    for one in engine.generate([[1, 2, 3]] * 3, [sample(2), sample(3), sample(1)]):
        batch[one.index] += one.token_ids
    assert batch[2] == first.ids and batch[0] != batch[1]
    fresh = [answer(engine, [1, 2, 3], sample(None)) for _ in range(2)]
    assert fresh[0].ids != fresh[1].ids
    assert fresh[0].ids == answer(engine, [1, 2, 3], sample(fresh[0].stats.seed)).ids


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
    together: list[list[int]] = [[] for _ in prompts]
    for one in engine.generate(prompts, limits, "ddtree", 16):
        together[one.index] += one.token_ids
    alone = [answer(engine, p, q, "ar").ids for p, q in zip(prompts, limits, strict=True)]
    assert together == alone


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
