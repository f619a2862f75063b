"""One round of speculative decoding: draft, build, verify, accept, commit.

Each verb reads and fills one `Round`. The engine decides who takes part and what is emitted.
"""

from dataclasses import dataclass, field

import numpy as np

from ddtree_numba.budget import StepTimes, best_size
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.rank import Ranks
from ddtree_numba.request import RoundTrace
from ddtree_numba.sampling import SamplingParams
from ddtree_numba.spec.tree_accept import Accept
from ddtree_numba.spec.tree_build import Tree

CANDIDATES = 64  # ranked tokens of a position that a tree may use


@dataclass
class Round:
    """What one round knows, in the order in which it comes to know it.

    | field         | shape   | meaning                                                    |
    |---------------|---------|------------------------------------------------------------|
    | roots         | [R]     | last emitted token of each request, not yet in the cache   |
    | starts        | [R]     | committed positions; the root's own position               |
    | room          | [R]     | deepest node that limits still allow                       |
    | page_table    | [R,M]   | pages of each request                                      |
    | token_ids     | [R,L,k] | draft: candidates of each position, likeliest first        |
    | log_probs     | [R,L,k] | draft: their log-probabilities                             |
    | tree          |         | build                                                      |
    | target_tokens | [R,N]   | verify: the target's own token after each node             |
    | accepted      |         | accept: the path that the target would have taken itself   |
    """

    roots: np.ndarray
    starts: np.ndarray
    room: np.ndarray
    page_table: np.ndarray
    seeds: list[int]
    params: list[SamplingParams]
    with_draft: bool
    token_ids: np.ndarray = field(init=False)
    log_probs: np.ndarray = field(init=False)
    tree: Tree = field(init=False)
    logits: np.ndarray = field(init=False)
    target_tokens: np.ndarray = field(init=False)
    accepted: Accept = field(init=False)

    def path_tokens(self, row: int) -> list[int]:
        """What a request's round yields: its accepted nodes' tokens, then the next token."""
        path = self.accepted.nodes[row, 1 : self.accepted.counts[row]]
        return [*map(int, self.tree.tokens[row, path]), int(self.accepted.next_tokens[row])]

    def trace(self, row: int, emitted: int) -> RoundTrace:
        """A request's tree and path, for display."""
        size, count = int(self.tree.sizes[row]), int(self.accepted.counts[row])
        return RoundTrace(
            tokens=self.tree.tokens[row, :size],
            parents=self.tree.parents[row, :size],
            scores=self.tree.scores[row, :size],
            size=size,
            accepted=[int(node) for node in self.accepted.nodes[row, :count]],
            next_token=int(self.accepted.next_tokens[row]),
            emitted=emitted,
        )


def draft(state: Round, ranks: Ranks, candidates: int) -> None:
    """Propose `candidates` tokens for each of the next positions; none where no node has room."""
    requests = len(state.roots)
    if not state.with_draft or not candidates or not state.room.max():
        state.token_ids = np.empty((requests, 0, 0), np.int32)
        state.log_probs = np.empty((requests, 0, 0), np.float32)
        return
    logits = ranks.draft(state.roots, state.starts, state.page_table)
    state.token_ids, state.log_probs = ranks.ops.draft_topk(logits, candidates)


def build(state: Round, ranks: Ranks, budget: int, times: StepTimes | None) -> None:
    """The `budget` most probable continuations as a tree; fewer where step times advise it."""
    depths = np.minimum(state.room, state.token_ids.shape[1]).astype(np.int32)
    if not depths.any():
        budget = 0
    tree = ranks.ops.tree_build(state.roots, state.token_ids, state.log_probs, budget, depths)
    sizes = tree.sizes
    if times is not None:
        rows = zip(tree.scores, sizes, strict=True)
        sizes = np.array([best_size(score, int(size), times) for score, size in rows], np.int32)
    state.tree = tree.prefix(sizes)


def verify(state: Round, ranks: Ranks) -> None:
    """One forward of the target over all nodes, then its own token after each."""
    tree = state.tree
    batch = VerifyInput.of_tree(tree, state.starts, state.page_table)
    state.logits = ranks.verify(batch, state.with_draft)
    state.target_tokens = np.full(tree.tokens.shape, -1, np.int32)
    for row, (size, params, seed) in enumerate(
        zip(tree.sizes, state.params, state.seeds, strict=True)
    ):
        positions = batch.positions[row, :size].astype(np.int64) + 1  # of the token to be drawn
        state.target_tokens[row, :size] = ranks.ops.next_token(
            state.logits[row, :size], positions, np.full(size, seed, np.uint64), params
        )


def accept(state: Round, ranks: Ranks) -> None:
    """Walk along the target's own tokens; the first that the tree misses is the next root."""
    state.accepted = ranks.ops.tree_accept(state.tree, state.target_tokens)


def commit(state: Round, ranks: Ranks, counts: np.ndarray) -> None:
    """Keep the first `counts` [R] rows of each path: the root, and all emitted but the last."""
    ranks.commit(state.starts, state.accepted.nodes, counts, state.page_table)
