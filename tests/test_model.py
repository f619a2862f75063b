"""The two models: absorbed and plain attention, taps, rows alone and in company, ranks."""

import numpy as np
import pytest

from ddtree_numba.load import Setup, Sources, load_checkpoint
from ddtree_numba.model.cache import PageTable
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.spec.numerics import widen
from ddtree_numba.spec.rms_norm import rms_norm
from ddtree_numba.spec.rope import rope
from ddtree_numba.spec.tree_attention import random_paths
from ddtree_numba.spec.tree_build import Tree

PAGES, SLOTS, NODES = 12, 3, 160


def build(embedded, dtype: str, tp: int = 1):
    loaded = load_checkpoint(Sources(embedded), Setup("numpy", tp, dtype))
    return loaded.build(PAGES, SLOTS, NODES, 64 * PAGES)


@pytest.fixture(scope="module")
def ranks(embedded):
    return build(embedded, "bfloat16")


@pytest.fixture(scope="module")
def ranks32(embedded):
    return build(embedded, "float32")


def drafted(ranks, *given) -> np.ndarray:
    """Draft logits [R,L,V]: what all ranks have, side by side."""

    def part(rank: int) -> np.ndarray:
        return ranks.ranks[rank].draft(*given)

    parts = ranks.group.run(part) if ranks.group else [part(0)]
    return np.concatenate(parts, axis=-1)


def tables(*lengths: int) -> np.ndarray:
    pages = PageTable(len(lengths), PAGES, 64 * PAGES)
    for slot, length in enumerate(lengths):
        assert pages.reserve(slot, length)
    return pages.rows


def commit_all(ranks, batch: VerifyInput) -> None:
    path = np.arange(batch.tokens.shape[1], dtype=np.int32)[None]
    ranks.commit(batch.starts, path, batch.sizes, batch.page_table)


def random_tree(rng, sizes: list[int], vocab: int) -> Tree:
    width = max(sizes)
    paths = random_paths(sizes, width, rng)
    depths = np.maximum((paths >= 0).sum(-1) - 1, 0)
    above = np.take_along_axis(paths, np.maximum(depths - 1, 0)[..., None], -1)[..., 0]
    parents = np.where(depths > 0, above, -1).astype(np.int32)
    tokens = rng.integers(0, vocab, (len(sizes), width)).astype(np.int32)
    scores = np.zeros((len(sizes), width), np.float32)
    return Tree(tokens, parents, depths.astype(np.int32), scores, np.array(sizes, np.int32))


def plain_attention(target, layer, h: np.ndarray) -> np.ndarray:
    """Multi-head attention with keys and values spelled out for every head, in float64."""
    c, n = target.config, len(h)
    positions = np.arange(n)
    joint = h @ widen(layer.qkv_a).T
    q_a, latent, k_rope = np.split(joint, [c.q_lora_rank, c.q_lora_rank + c.kv_lora_rank], axis=1)
    latent = rms_norm(latent, layer.kv_a_norm, c.mla_norm_eps)
    q = (rms_norm(q_a, layer.q_a_norm, c.mla_norm_eps) @ layer.q_b.T).reshape(n, target.heads, -1)
    q_nope, q_rope = np.split(q, [c.qk_nope_head_dim], axis=-1)
    q_rope = rope(q_rope, positions, target.inv_freq)
    k_rope = rope(k_rope, positions, target.inv_freq)
    k_nope = np.einsum("tc,hnc->thn", latent, layer.w_uk, dtype=np.float64)
    value = np.einsum("tc,hcv->thv", latent, layer.w_uv, dtype=np.float64)
    scores = np.einsum("thn,shn->hts", q_nope, k_nope) + np.einsum("thr,sr->hts", q_rope, k_rope)
    scores = np.where(np.tri(n, dtype=bool), scores * target.scale, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    out = np.einsum("hts,shv->thv", weight, value).reshape(n, -1)
    return out @ layer.o.T


@pytest.mark.parametrize("n", [1, 2, 6, 150])
def test_m04_absorbed_attention_is_plain_attention(ranks32, rng, n: int):
    """From position 1 on, a softmax scale without YaRN's squared factor would show."""
    rank = ranks32.ranks[0]
    target, layer = rank.target, rank.target.weights.layers[1]
    h = rng.standard_normal((n, target.config.hidden_size)).astype(np.float32)
    batch = VerifyInput.of_chain(np.zeros(n, np.int32), 0, tables(n))
    got = target.attention(layer, h, batch, rank.cache, 1)
    want = plain_attention(target, layer, h)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()
    target.scale, scale = 192**-0.5, target.scale
    wrong = target.attention(layer, h, batch, rank.cache, 1)
    target.scale = scale
    assert n == 1 or np.abs(wrong - want).max() > 1e-3 * np.abs(want).max()


def test_taps_are_the_residual_stream_after_each_layer(ranks32, rng):
    rank = ranks32.ranks[0]
    target = rank.target
    tokens = rng.integers(0, 1792, 9).astype(np.int32)
    batch = VerifyInput.of_chain(tokens, 0, tables(9))
    _, taps = target.forward(batch, rank.cache, (0, 3, 5))
    x = target.embed(tokens)
    wanted = []
    for index, layer in enumerate(target.weights.layers):
        x = x + target.attention(
            layer, rms_norm(x, layer.input_norm, 1e-6), batch, rank.cache, index
        )
        x = x + target.mlp(layer.mlp, rms_norm(x, layer.post_norm, 1e-6), np.array([len(x)]))
        wanted.append(x)
    assert np.array_equal(taps, np.concatenate([wanted[i] for i in (0, 3, 5)], axis=-1))


@pytest.mark.parametrize("kind", ["ranks", "ranks32"])
def test_s09_a_nodes_logits_do_not_depend_on_its_company(kind: str, request, rng):
    """Trees of several requests at once, and each path committed and decoded alone: equal bits."""
    ranks = request.getfixturevalue(kind)
    lengths, sizes = [130, 63, 1], [65, 17, 1]
    rows = tables(*(length + 70 for length in lengths))
    prompts = [rng.integers(0, 1792, length).astype(np.int32) for length in lengths]
    for r, prompt in enumerate(prompts):
        batch = VerifyInput.of_chain(prompt, 0, rows[r : r + 1])
        ranks.forward(batch, False)
        commit_all(ranks, batch)
    tree = random_tree(rng, sizes, 1792)
    starts = np.array(lengths, np.int32)
    batch = VerifyInput.of_tree(tree, starts, rows)
    together = ranks.verify(batch, False)
    for r, size in enumerate(sizes):
        for i in sorted({0, size // 3, size // 2, size - 1}):
            path = batch.paths[r, i][batch.paths[r, i] >= 0]
            for depth, node in enumerate(path):  # one token a step, committed before the next
                token = tree.tokens[r, node : node + 1]
                step = VerifyInput.of_chain(token, lengths[r] + depth, rows[r : r + 1])
                alone = ranks.verify(step, False)
                commit_all(ranks, step)
            assert np.array_equal(alone[0, 0], together[r, i])


@pytest.mark.parametrize("cut", [1, 63, 64, 100, 149])
def test_s09_a_prompt_in_any_pieces_gives_the_same_bits(ranks, rng, cut: int):
    prompt = rng.integers(0, 1792, 150).astype(np.int32)
    rows = tables(150, 150)
    whole = ranks.verify(VerifyInput.of_chain(prompt, 0, rows[:1]), False)[0]
    first = VerifyInput.of_chain(prompt[:cut], 0, rows[1:])
    head = ranks.verify(first, False)[0]
    commit_all(ranks, first)
    tail = ranks.verify(VerifyInput.of_chain(prompt[cut:], cut, rows[1:]), False)[0]
    assert np.array_equal(np.concatenate([head, tail]), whole)


def test_m01_padding_leaves_real_rows_alone(ranks, rng):
    rows = tables(80, 80)
    tree = random_tree(rng, [9, 3], 1792)
    starts = np.zeros(2, np.int32)
    padded = ranks.verify(VerifyInput.of_tree(tree, starts, rows), False)
    small = Tree(*(getattr(tree, f)[1:, :3] for f in ("tokens", "parents", "depths", "scores")),
                 tree.sizes[1:])  # fmt: skip
    alone = ranks.verify(VerifyInput.of_tree(small, starts[1:], rows[1:]), False)
    assert np.isfinite(padded).all()
    assert np.array_equal(padded[1, :3], alone[0])


def test_drafts_do_not_depend_on_company_or_pages(ranks, rng):
    lengths = [100, 64, 7]
    prompts = [rng.integers(0, 1792, length).astype(np.int32) for length in lengths]
    roots = np.array([5, 6, 7], np.int32)
    rows = tables(*lengths)
    for r, prompt in enumerate(prompts):
        batch = VerifyInput.of_chain(prompt, 0, rows[r : r + 1])
        ranks.forward(batch, True)
        commit_all(ranks, batch)
    starts = np.array(lengths, np.int32)
    together = drafted(ranks, roots, starts, rows)
    assert together.shape == (3, 7, 2048)
    for r in range(3):
        alone = drafted(ranks, roots[r : r + 1], starts[r : r + 1], rows[r : r + 1])
        assert np.array_equal(alone[0], together[r])


def test_draft_from_an_empty_context(ranks):
    logits = drafted(ranks, np.array([5], np.int32), np.zeros(1, np.int32), tables(64))
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("tp", [2, 8])
def test_e06_ranks_as_threads_agree_with_one_rank(ranks32, embedded, rng, tp: int):
    """A shared expert or residual counted once a rank would be far off."""
    split = build(embedded, "float32", tp)
    prompt = rng.integers(0, 1792, 70).astype(np.int32)
    batch = VerifyInput.of_chain(prompt, 0, tables(80))
    outputs = []
    for ranks in (ranks32, split):
        logits = ranks.verify(batch, True)[0]
        commit_all(ranks, batch)
        drafts = drafted(ranks, prompt[:1], batch.sizes, batch.page_table)[0]
        outputs.append((logits, drafts))
    for one, many in zip(*outputs, strict=True):
        assert np.abs(one - many).max() < 2e-4 * np.abs(one).max()


def test_s34_every_rank_holds_the_same_logits(embedded, rng):
    split = build(embedded, "bfloat16", 4)
    batch = VerifyInput.of_chain(rng.integers(0, 1792, 20).astype(np.int32), 0, tables(20))
    answers = split.group.run(lambda rank: split.ranks[rank].verify(batch, False))
    assert all(np.array_equal(answers[0], other) for other in answers[1:])


def test_c02_a_failing_rank_frees_the_others(embedded):
    split = build(embedded, "bfloat16", 2)

    def work(rank: int):
        if rank == 1:
            raise RuntimeError("planted on rank 1")
        return split.group.comms[rank].all_reduce(np.zeros((1, 4), np.float32))

    with pytest.raises(RuntimeError, match="planted on rank 1"):
        split.group.run(work)
    total = split.group.run(lambda r: split.group.comms[r].all_reduce(np.ones((1, 4), np.float32)))
    assert all((part == 2).all() for part in total)


@pytest.mark.filterwarnings("error")
def test_s12_an_overflow_reaches_the_logits_without_noise(embedded):
    """A broken weight shows as non-finite logits, which the engine reports by name."""
    ranks = build(embedded, "bfloat16")
    ranks.ranks[0].target.weights.layers[2].o[:] = 3e38
    logits = ranks.verify(VerifyInput.of_chain(np.arange(3), 0, tables(3)), False)
    assert not np.isfinite(logits).any()
