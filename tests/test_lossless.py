"""The law: drafting changes how many tokens a step yields, never which, nor a bit of a logit."""

import itertools

import numpy as np
import pytest

from ddtree_numba.engine import Engine
from ddtree_numba.model.inputs import VerifyInput
from tests.answers import PROMPTS, TOKENS, decode, sampling

BUDGETS = (1, 2, 7, 8, 16, 63, 64, 65)
DRAFTS = [("ddtree", b) for b in BUDGETS] + [("ddtree", "auto"), ("chain", "auto")]
SAMPLINGS = [None, 1, 2, 3]  # greedy, or the seed of a draw at temperature 0.8
_plain: dict[tuple, list[int]] = {}


def plain(engine: Engine, index: int, seed: int | None) -> list[int]:
    """Prompt `index` decoded alone, one token a step."""
    if (index, seed) not in _plain:
        _plain[index, seed] = decode(engine, [PROMPTS[index]], sampling(seed), "ar", 0)[0]
    return _plain[index, seed]


def check(engine: Engine, indices: list[int], seed: int | None, mode: str, budget) -> None:
    wanted = [plain(engine, index, seed) for index in indices]
    assert all(len(tokens) == TOKENS for tokens in wanted)
    assert decode(engine, [PROMPTS[i] for i in indices], sampling(seed), mode, budget) == wanted


CASES = list(itertools.product(DRAFTS, SAMPLINGS))


@pytest.mark.parametrize(("draft", "seed"), CASES)
def test_s09_speculation_changes_no_token(engine, draft, seed):
    """Every way of drafting, every sampling, a prompt alone and four together; prompts rotate."""
    turn = 5 * CASES.index((draft, seed))
    alone, *together = [(turn + i) % len(PROMPTS) for i in range(5)]
    check(engine, [alone], seed, *draft)
    check(engine, together, seed, *draft)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize(("draft", "seed"), CASES)
def test_s09_speculation_changes_no_token_of_any_prompt(engine, draft, seed, batch):
    for first in range(0, len(PROMPTS), batch):
        check(engine, list(range(first, min(first + batch, len(PROMPTS)))), seed, *draft)


def check_bits(engine: Engine, index: int, seed: int | None, budget, monkeypatch) -> int:
    """Decode a prompt; at every node of every round compare with its path decoded as plain text."""
    ranks, nodes = engine.ranks, 0
    verify = type(ranks).verify

    def compared(batch: VerifyInput, with_taps: bool, draws) -> np.ndarray:
        nonlocal nodes
        for i in range(int(batch.sizes[0])):
            path = batch.paths[0, i][batch.paths[0, i] >= 0]
            chain = VerifyInput.of_chain(
                batch.tokens[0, path], int(batch.starts[0]), batch.page_table
            )
            plain_bits[i] = verify(ranks, chain, False)[0, -1]
        logits = verify(ranks, batch, with_taps)  # last: its rows and taps are the ones to commit
        for i in range(int(batch.sizes[0])):
            assert np.array_equal(logits[0, i], plain_bits[i])
            nodes += 1
        return ranks.ops.next_tokens(logits, batch, draws, ranks.comm)

    plain_bits: dict[int, np.ndarray] = {}
    monkeypatch.setattr(ranks, "choose", compared)
    got = decode(engine, [PROMPTS[index]], sampling(seed), "ddtree", budget)[0]
    monkeypatch.undo()
    assert got == plain(engine, index, seed)
    return nodes


@pytest.mark.parametrize(("index", "seed", "budget"), [(0, None, 16), (9, 1, 7), (20, None, 33)])
def test_s09_logits_of_every_verified_node_are_plain_bits(
    engine, index, seed, budget, monkeypatch, record_property
):
    nodes = check_bits(engine, index, seed, budget, monkeypatch)
    record_property("summary", f"prompt {index}, budget {budget}: {nodes} nodes bit-equal")
    assert nodes > TOKENS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_s09_logits_of_every_node_of_every_prompt(engine, index, monkeypatch):
    for seed, budget in ((None, 16), (1, 64)):
        assert check_bits(engine, index, seed, budget, monkeypatch) > TOKENS


def test_accepted_rows_are_what_plain_decoding_caches(engine):
    """After an answer the committed cache rows are, bit for bit, those of one-token steps."""
    kept = []
    for mode in ("ddtree", "ar"):
        answer = engine.generate([PROMPTS[0]], sampling(None), mode, 16)
        length, pages = 0, engine.ranks.ranks[0].cache.pages
        for one in answer:
            length += len(one.token_ids)
            if length >= TOKENS - 8:
                break
        table = engine.pages.rows[0]
        rows = pages[:, table[table >= 0]].reshape(len(pages), -1, pages.shape[-1])
        kept.append(rows[:, : len(PROMPTS[0]) - 1 + TOKENS - 16].copy())
        answer.close()
    assert np.array_equal(kept[0], kept[1])
