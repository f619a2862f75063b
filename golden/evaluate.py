"""Tokens per round on held-out prompts, as the engine counts them: emitted tokens over rounds.

Greedy decoding is lossless, so one plain continuation fixes what every round accepts: draft at an
anchor, build the tree, follow the continuation through it, and the next anchor is the first token
the tree missed.
"""

import heapq
from typing import NamedTuple

import numpy as np
import torch
from continuations import extend
from torch import Tensor
from torch_drafter import Drafter
from torch_target import Target

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
ANCHORS = 32  # of a drafter pass


class Draft(NamedTuple):
    """Of every anchor: token ids [A, L, k] and log probabilities [A, L, k], best first."""

    token_ids: np.ndarray
    log_probs: np.ndarray


@torch.no_grad()
def decode(
    target: Target, prompts: list[list[int]], new_tokens: int, device: str
) -> list[list[int]]:
    """Prompt and greedy continuation, in float32."""
    width = max(map(len, prompts))
    ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    zeros = torch.zeros(len(ids), device=device)
    made = extend(target, ids, lengths, new_tokens, zeros, zeros)
    return [row[:n] for row, n in zip(made.ids.tolist(), made.lengths.tolist(), strict=True)]


@torch.no_grad()
def draft(
    target: Target, drafter: Drafter, ids: list[int], first: int, device: str, k: int = 64
) -> Draft:
    """Marginals at the anchors first .. len(ids) - 2."""
    row = torch.tensor([ids], device=device)
    taps: list[Tensor] = []
    target(row, taps)
    features = torch.cat(taps, -1)
    found = []
    for anchors in torch.arange(first, len(ids) - 1, device=device).split(ANCHORS):
        states = drafter(row, features, anchors.unsqueeze(0), target.embed_tokens.weight)
        log_probs = torch.log_softmax(states[0] @ target.lm_head.weight.T, -1)
        found.append(log_probs.topk(k, dim=-1))
    token_ids, log_probs = (
        torch.cat(parts).numpy(force=True)
        for parts in ([top.indices for top in found], [top.values for top in found])
    )
    return Draft(token_ids, log_probs)


def tree_hits(token_ids: np.ndarray, log_probs: np.ndarray, budget: int, wanted: list[int]) -> int:
    """How many wanted tokens a best-first tree of `budget` nodes holds as a path from its root."""
    depths = len(log_probs)
    top = min(budget, token_ids.shape[1])
    heap = [(-float(log_probs[0, 0]), (0,))]
    ranks = set()
    while heap and len(ranks) < budget:
        score, path = heapq.heappop(heap)
        ranks.add(path)
        depth, last = len(path), path[-1]
        if last + 1 < top:
            step = float(log_probs[depth - 1, last] - log_probs[depth - 1, last + 1])
            heapq.heappush(heap, (score + step, (*path[:-1], last + 1)))
        if depth < depths:
            heapq.heappush(heap, (score - float(log_probs[depth, 0]), (*path, 0)))
    path = ()
    for depth, token in enumerate(wanted[:depths]):
        rank = np.flatnonzero(token_ids[depth] == token)
        if not len(rank) or (*path, int(rank[0])) not in ranks:
            break
        path = (*path, int(rank[0]))
    return len(path)


def chain_hits(token_ids: np.ndarray, wanted: list[int]) -> int:
    same = [a == b for a, b in zip(token_ids[:, 0].tolist(), wanted, strict=False)]
    return (*same, False).index(False)


def rounds(drafted: Draft, ids: list[int], prompt: int, budget: int | None) -> int:
    """Rounds that emit ids[prompt:]; budget None is the chain."""
    at, count = prompt - 1, 0
    while at < len(ids) - 1:
        anchor = at - (prompt - 1)
        wanted = ids[at + 1 :]
        tops = drafted.token_ids[anchor]
        found = (
            chain_hits(tops, wanted)
            if budget is None
            else tree_hits(tops, drafted.log_probs[anchor], budget, wanted)
        )
        at += found + 1
        count += 1
    return count


def tokens_per_round(
    target: Target, drafter: Drafter, prompts: list[list[int]], new_tokens: int, device: str
) -> dict[str, float | list[float]]:
    """Mean over all rounds of all prompts, for chain and budgets; hit rate of every depth."""
    decoded = decode(target, prompts, new_tokens, device)
    emitted, used = 0, {"chain": 0} | {str(budget): 0 for budget in BUDGETS}
    hits = []
    for prompt, ids in zip(prompts, decoded, strict=True):
        drafted = draft(target, drafter, ids, len(prompt) - 1, device)
        emitted += len(ids) - len(prompt)
        depths = drafted.token_ids.shape[1]
        if len(ids) - len(prompt) > depths:
            after = np.lib.stride_tricks.sliding_window_view(np.array(ids[len(prompt) :]), depths)
            hits.append(drafted.token_ids[: len(after), :, 0] == after)
        for name in used:
            used[name] += rounds(drafted, ids, len(prompt), None if name == "chain" else int(name))
    accuracy = np.concatenate(hits).mean(0)
    means = {name: round(emitted / count, 3) for name, count in used.items()}
    return means | {"accuracy_by_depth": [round(float(x), 4) for x in accuracy]}
