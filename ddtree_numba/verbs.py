"""One round of speculative decoding: draft, build, verify, accept, commit.

Each verb reads and fills one `Round`. The engine decides who takes part and what is emitted.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddtree_numba.budget import StepTimes
from ddtree_numba.model.rank import Ranks
from ddtree_numba.spec.tree_accept import Accept
from ddtree_numba.spec.tree_build import Tree

CANDIDATES = 64  # ranked tokens of a position that a tree may use


@dataclass(frozen=True)
class Plan:
    """What a round does: modes differ in nothing else.

    | field      | meaning                                                                    |
    |------------|----------------------------------------------------------------------------|
    | with_draft | the drafter is asked, and its context kept up to date                      |
    | candidates | ranked tokens of a position that a tree may use; 0: nothing is drafted     |
    | budget     | nodes beside the root                                                      |
    | times      | step times if they decide how many of the nodes are verified               |
    """

    with_draft: bool
    candidates: int
    budget: int
    times: StepTimes | None = None


@dataclass
class Round:
    """What one round knows, in the order in which it comes to know it.

    | field         | shape   | meaning                                                    |
    |---------------|---------|------------------------------------------------------------|
    | roots         | [R]     | last emitted token of each request, not yet in the cache   |
    | starts        | [R]     | committed positions; the root's own position               |
    | room          | [R]     | deepest node that limits still allow                       |
    | page_table    | [R,M]   | pages of each request                                      |
    | draws         |         | how each request's tokens are chosen (`ops.draws`)         |
    | token_ids     | [R,L,k] | draft: candidates of each position, likeliest first        |
    | log_probs     | [R,L,k] | draft: their log-probabilities                             |
    | tree          |         | build                                                      |
    | target_tokens | [R,N]   | verify: the target's own token after each node             |
    | accepted      |         | accept: the path that the target would have taken itself   |
    | tokens        | [R,D]   | commit: what each request emits, then -1                   |

    Committing moves `roots`, `starts` and `room` on: they are the next round's.
    """

    roots: np.ndarray
    starts: np.ndarray
    room: np.ndarray
    page_table: np.ndarray
    draws: Any
    token_ids: np.ndarray = field(init=False)
    log_probs: np.ndarray = field(init=False)
    tree: Tree = field(init=False)
    target_tokens: np.ndarray = field(init=False)
    accepted: Accept = field(init=False)
    tokens: np.ndarray = field(init=False)


def play(state: Round, ranks: Ranks, plan: Plan) -> None:
    """One round."""
    span = ranks.ops.span
    with span("draft"):
        draft(state, ranks, plan)
    with span("build"):
        build(state, ranks, plan)
    with span("verify"):
        verify(state, ranks, plan)
    with span("accept"):
        accept(state, ranks)
    with span("commit"):
        commit(state, ranks)


def draft(state: Round, ranks: Ranks, plan: Plan) -> None:
    """Propose candidates for each of the next positions."""
    if plan.candidates:
        given = state.roots, state.starts, state.page_table
        state.token_ids, state.log_probs = ranks.candidates(*given, plan.candidates)
    else:
        state.token_ids, state.log_probs = ranks.ops.no_candidates(len(state.roots))


def build(state: Round, ranks: Ranks, plan: Plan) -> None:
    """The most probable continuations as a tree; fewer of them where step times advise it."""
    ops = ranks.ops
    room = ops.xp.maximum(state.room, 0)  # below 0 where an answer has ended meanwhile
    depths = ops.xp.minimum(room, state.token_ids.shape[1])
    tree = ops.tree_build(state.roots, state.token_ids, state.log_probs, plan.budget, depths)
    if plan.times is not None:
        seconds = ops.constant(StepTimes.round_seconds, plan.times, tree.scores.shape[1])
        sizes = ops.tree_size(tree.scores, tree.sizes, seconds)
        tree = ops.tree_prefix(tree, sizes)
    state.tree = tree


def verify(state: Round, ranks: Ranks, plan: Plan) -> None:
    """One forward of the target over all nodes, then its own token after each."""
    batch = ranks.ops.verify_input(state.tree, state.starts, state.page_table)
    state.target_tokens = ranks.choose(batch, plan.with_draft, state.draws)


def accept(state: Round, ranks: Ranks) -> None:
    """Walk along the target's own tokens; the first that the tree misses is the next root."""
    state.accepted = ranks.ops.tree_accept(state.tree, state.target_tokens)


def commit(state: Round, ranks: Ranks) -> None:
    """Keep each path's rows, the root and every accepted node, and move on."""
    nodes, counts = state.accepted.nodes, state.accepted.counts
    ranks.commit(state.starts, nodes, counts, state.page_table)
    state.tokens = ranks.ops.round_advance(
        *(state.roots, state.starts, state.room, state.tree.tokens),
        *(nodes, counts, state.accepted.next_tokens),
    )
