"""The decode loop around a scripted model: limits, stops, statistics, pages, admission."""

import numpy as np
import pytest

from ddtree_numba.sampling import SamplingParams
from tests.answers import decode
from tests.scripted import answer, count_up, right, scripted_engine, wrong


def following(*run: int):
    """A model that continues the prompt (7,) with `run`, and then with 1."""

    def target(prefix: tuple[int, ...]) -> int:
        made = prefix[1:]
        known = len(made) < len(run) and made == run[: len(made)]
        return run[len(made)] if known else 1

    return target


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
    batch = decode(engine, [[1, 2, 3]] * 3, [sample(2), sample(3), sample(1)])
    assert batch[2] == first.ids and batch[0] != batch[1]
    fresh = [answer(engine, [1, 2, 3], sample(None)) for _ in range(2)]
    assert fresh[0].ids != fresh[1].ids
    assert fresh[0].ids == answer(engine, [1, 2, 3], sample(fresh[0].stats.seed)).ids


def test_different_experts_of_rounds_are_counted(embedded, monkeypatch):
    from ddtree_numba.engine import Engine

    engine = Engine.load(embedded, backend="numpy", max_batch=2)
    (rank,) = engine.ranks.ranks
    router, chosen = rank.ops.router, []

    def watched(h, *given):
        experts, weights = router(h, *given)
        chosen.append(len(np.unique(experts)))
        return experts, weights

    for _ in engine.generate([[5, 6, 7], [8]], SamplingParams(max_new_tokens=3), "ar"):
        pass  # counts nothing
    rank.count_experts()
    monkeypatch.setattr(rank.ops, "router", watched)
    for _ in engine.generate([[5], [8]], SamplingParams(max_new_tokens=9), "ddtree", 8):
        pass  # single tokens: no prefill
    layers = engine.config.num_hidden_layers - engine.config.first_k_dense_replace
    wanted = np.array(chosen).reshape(-1, layers).sum(axis=0)
    assert rank.used.tolist() == [0] * engine.config.first_k_dense_replace + wanted.tolist()
