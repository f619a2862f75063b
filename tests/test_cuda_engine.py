"""The engine on a GPU: golden tokens, and the law to the bit, at every node of every round."""

from itertools import zip_longest

import numpy as np
import pytest

from ddtree_numba.engine import Engine
from ddtree_numba.sampling import SamplingParams
from tests.answers import LINES, PROMPTS, TOKENS, decode, sampling
from tests.test_golden import SURE, TREES, check_steps, tree

pytestmark = pytest.mark.gpu

DRAFTS = [("ddtree", b) for b in (1, 2, 8, 16, 64, 65)] + [("ddtree", "auto"), ("chain", "auto")]


@pytest.fixture(scope="module")
def engine(embedded) -> Engine:
    return Engine.load(embedded, backend="cuda", max_batch=16)


@pytest.fixture(scope="module")
def plain(engine) -> dict[int | None, list[list[int]]]:
    """Every prompt decoded alone, one token a step; greedy, and drawn."""
    return {
        seed: [decode(engine, [prompt], sampling(seed), "ar", 0)[0] for prompt in PROMPTS]
        for seed in (None, 1)
    }


def test_golden_tokens_at_every_sure_step(engine, record_property):
    bound = SURE["bfloat16"]
    steps, below, turned = check_steps(engine, LINES, bound)
    record_property(
        "summary",
        f"golden tokens on the GPU: {steps} steps, {below} lead by {bound} or less, of which"
        f" {len(turned)} turned (largest lead turned {max(turned, default=0):.3f})",
    )
    assert below < steps / 5


@pytest.mark.parametrize("name", TREES)
def test_golden_tree_logits(engine, name: str):
    prompt, tokens, parents, logits = tree(name).values()
    ours = engine.logits(prompt.tolist(), tokens.tolist(), parents.tolist())
    assert np.abs(ours - logits).max() < 0.2 * np.abs(logits).max()


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("draft", DRAFTS)
def test_s09_speculation_changes_no_token_of_any_prompt(engine, plain, draft, seed, batch):
    for first in range(0, len(PROMPTS), batch):
        group = range(first, min(first + batch, len(PROMPTS)))
        got = decode(engine, [PROMPTS[i] for i in group], sampling(seed), *draft)
        assert got == [plain[seed][i] for i in group]


def check_bits(engine: Engine, prompt: list[int], params: SamplingParams, budget: int) -> int:
    """Each round's whole tree against its paths as plain text, to the bit -> how many nodes."""
    text, nodes = list(prompt), 0
    known: dict[tuple, np.ndarray] = {}
    for one in engine.generate([prompt], params, "ddtree", budget):
        tokens, parents = one.round.tokens.tolist(), one.round.parents.tolist()
        logits = engine.logits(text, tokens[1:], parents[1:])
        for node in range(one.round.size):
            path, at = [], node
            while at > 0:
                path.insert(0, tokens[at])
                at = parents[at]
            prefix = (*text, *path)
            if prefix not in known:
                known[prefix] = engine.logits(list(prefix))[0]
            assert np.array_equal(logits[node], known[prefix])
            nodes += 1
        text += one.token_ids
    return nodes


@pytest.mark.parametrize(("index", "seed", "budget"), [(0, None, 16), (9, 1, 7), (20, None, 64)])
def test_s09_logits_of_every_verified_node_are_plain_bits(
    engine, index, seed, budget, record_property
):
    nodes = check_bits(engine, PROMPTS[index], sampling(seed), budget)
    record_property("summary", f"GPU, prompt {index}, budget {budget}: {nodes} nodes bit-equal")
    assert nodes > TOKENS


def test_a_prompt_in_any_chunks_gives_the_same_bits(engine, monkeypatch):
    prompt = (PROMPTS[0] * 8)[:400]
    whole = engine.logits(prompt)
    for chunk in (1, 63, 64, 100, 256):
        monkeypatch.setattr("ddtree_numba.prefill.CHUNK", chunk)
        assert np.array_equal(engine.logits(prompt), whole)


def test_a_round_is_one_graph_and_the_host_is_a_round_behind(engine):
    assert decode(engine, [PROMPTS[0]], sampling(None), "ddtree", 13)
    plans = {key[0]: each.graph for key, each in engine.rounds.player.captured.items()}
    graphs = [graph for plan, graph in plans.items() if plan.budget == 13]
    assert len(graphs) == 1 and graphs[0] is not None
    assert engine.rounds.ahead == 1


def test_no_graph_writes_to_what_another_needs(engine, plain):
    """Sizes in turn, and again: workspaces, constants and draws of each are made between them."""
    for _ in range(3):
        for batch, budget in ((1, 8), (16, 64), (3, 1), (2, 33), (1, "auto")):
            got = decode(engine, PROMPTS[:batch], sampling(1), "ddtree", budget)
            assert got == plain[1][:batch]


def test_generators_that_take_turns_or_are_dropped(engine, plain):
    first, second = (engine.generate([prompt], sampling(1), "ddtree", 16) for prompt in PROMPTS[:2])
    answers: list[list[int]] = [[], []]
    for both in zip_longest(first, second):
        dropped = engine.generate([PROMPTS[2]], sampling(1), "ddtree", 16)
        next(dropped)
        dropped.close()
        for answer, one in zip(answers, both, strict=True):
            answer += one.token_ids if one else []
    assert answers == plain[1][:2]


def test_experts_are_counted_in_graphs(embedded):
    counting = Engine.load(embedded, backend="cuda", max_batch=1)
    (rank,) = counting.ranks.ranks
    rank.count_experts()
    decode(counting, PROMPTS[:1], sampling(None), "ddtree", 8)
    used, rounds = rank.ops.host(rank.used), counting.rounds.player.played
    c = counting.config
    assert (used[: c.first_k_dense_replace] == 0).all()
    routed = used[c.first_k_dense_replace :]
    assert (routed > c.num_experts_per_tok * rounds).all()
    assert (routed <= c.n_routed_experts * rounds).all()


@pytest.mark.slow
def test_soak_of_random_prompts(engine, rng):
    """10,000 rounds: no difference, no page and no memory lost."""
    rounds, free = 0, engine.pages.free_pages
    budgets, prompt = (1, 7, 16, 33, 64), list(range(1, 300))

    def held() -> int:
        return sum(
            pool.total_bytes() for pool in (engine.ranks.ops.pool, engine.rounds.player.pool)
        )

    for requests in range(8, 0, -1):  # the graphs of every size
        for seed in (None, 1):
            decode(engine, [prompt] * requests, sampling(seed), "ar", 0)
            for budget in budgets:
                decode(engine, [prompt] * requests, sampling(seed), "ddtree", budget)
    begun, used = held(), None  # used: by half of the rounds, when blocks of all sizes are cut
    while rounds < 10_000:
        sizes = rng.integers(1, 300, 8)
        prompts = [rng.integers(0, engine.config.vocab_size, n).tolist() for n in sizes]
        seed = None if rng.random() < 0.5 else int(rng.integers(1 << 31))
        budget = int(rng.choice(budgets))
        wanted = decode(engine, prompts, sampling(seed), "ar", 0)
        for one in engine.generate(prompts, sampling(seed), "ddtree", budget):
            assert one.error is None and one.token_ids == wanted[one.index][: len(one.token_ids)]
            del wanted[one.index][: len(one.token_ids)]
            rounds += 1
        assert not any(wanted) and engine.pages.free_pages == free
        if used is None and rounds >= 5_000:
            used = held()
    assert held() < 1.5 * begun and held() < 1.1 * used
