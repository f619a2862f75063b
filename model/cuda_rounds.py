"""The operations of a round around its forward passes, as kernels on the current GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddtree_numba.kernels import (
    draft_topk,
    next_token,
    round_advance,
    tree_accept,
    tree_build,
    tree_mask,
    tree_size,
)
from ddtree_numba.kernels.row_settings import Settings, settings
from ddtree_numba.model.cuda_arrays import Array, CudaArrays
from ddtree_numba.model.cuda_heads import sharded_next_token, sharded_topk
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.spec.next_token import SamplingParams
from ddtree_numba.spec.numerics import F32
from ddtree_numba.spec.tree_accept import Accept
from ddtree_numba.spec.tree_build import Tree


@dataclass(frozen=True)
class Draws:
    """How the token after each node is chosen: settings and seeds [R N], on the device."""

    settings: Settings
    seeds: Array

    @property
    def kind(self) -> tuple[bool, ...]:
        """Which launches they ask for."""
        each = self.settings
        return each.sampled, each.ranked, each.massed, each.cut

    def write(self, other: "Draws") -> None:
        """Take over the values of another one of the same kind and size."""
        for name in ("temperature", "top_k", "share", "min_p"):
            getattr(self.settings, name)[...] = getattr(other.settings, name)
        self.seeds[...] = other.seeds


class CudaRounds(CudaArrays):
    """Draft candidates, trees, tokens: what happens between the ends of the models."""

    def candidates(self, part, k: int, comm: Any):
        """The k likeliest tokens of each row [R,L,k], of logits that are cut over ranks."""
        if comm.world > 1:
            return sharded_topk(part, k, comm.rank * part.shape[-1], comm.gather, self)
        requests, depths, vocabulary = part.shape
        k = min(k, vocabulary)
        shape = (requests, depths, k)
        out = self.empty(shape, np.int32), self.empty(shape, F32)
        words = draft_topk.workspace_words(requests * depths, vocabulary)
        space = self.workspace("draft_topk", words, shape)
        return draft_topk.draft_topk(part, k, workspace=space, out=out)

    def tree_build(self, roots, token_ids, log_probs, budget: int, max_depths=None) -> Tree:
        shape = (len(roots), budget + 1)
        tokens, parents, depths = (self.empty(shape, np.int32) for _ in range(3))
        sizes = self.empty((len(roots),), np.int32)
        out = Tree(tokens, parents, depths, self.empty(shape, F32), sizes)
        return tree_build.tree_build(roots, token_ids, log_probs, budget, max_depths, out=out)

    def tree_size(self, scores, sizes, seconds):
        return tree_size.tree_size(scores, sizes, seconds, out=self.empty(sizes.shape, np.int32))

    def tree_prefix(self, tree: Tree, sizes) -> Tree:
        """The first sizes[r] nodes; the width stays, and what lies beyond is padding."""
        return replace(tree, sizes=sizes)

    def verify_input(self, tree: Tree, starts, page_table) -> VerifyInput:
        requests, nodes = tree.tokens.shape
        paths = self.empty((requests, nodes, min(nodes, tree_build.MAX_DEPTHS + 1)), np.int32)
        positions = self.empty((requests, nodes), np.int32)
        tree_mask.tree_paths(
            *(tree.parents, tree.depths, tree.sizes), out=paths, starts=starts, positions=positions
        )
        parts = (tree.tokens, positions, tree.parents, paths, tree.sizes)
        return VerifyInput(*parts, starts, page_table)

    def draws(self, params: Sequence[SamplingParams], seeds: Sequence[int], nodes: int) -> Draws:
        host = settings(params, len(params))
        each = {k: v for k, v in vars(host).items() if isinstance(v, np.ndarray)}
        each["seeds"] = np.array(seeds, np.uint64)
        arrays = {k: self.array(np.repeat(v, nodes)) for k, v in each.items()}
        return Draws(seeds=arrays.pop("seeds"), settings=replace(host, **arrays))

    def next_tokens(self, part, batch: VerifyInput, draws: Draws, comm: Any):
        """The token after every node, int32 [R,N], of logits that are cut over ranks."""
        rows = batch.tokens.size
        positions = batch.positions.reshape(-1).astype(np.int64) + 1  # of the drawn token
        filters = draws.settings.ranked or draws.settings.massed
        if comm.world > 1 and not (filters or draws.settings.cut):
            given = part.reshape(rows, -1), positions, draws, comm.rank * part.shape[-1]
            return sharded_next_token(*given, comm.gather, self).reshape(batch.tokens.shape)
        space = self.workspace("next_token", next_token.workspace_words(rows, filters))
        out = self.empty((rows,), np.int32)
        tokens = next_token.next_token(
            *(comm.all_gather(part).reshape(rows, -1), positions, draws.seeds, draws.settings),
            workspace=space,
            out=out,
        )
        return tokens.reshape(batch.tokens.shape)

    def tree_accept(self, tree: Tree, target_tokens) -> Accept:
        requests, nodes = tree.tokens.shape
        path = self.empty((requests, min(nodes, tree_build.MAX_DEPTHS + 1)), np.int32)
        out = Accept(path, self.empty((requests,), np.int32), self.empty((requests,), np.int32))
        return tree_accept.tree_accept(tree, target_tokens, out=out)

    def round_advance(self, roots, starts, room, tree_tokens, nodes, counts, next_tokens):
        given = (roots, starts, room, tree_tokens, nodes, counts, next_tokens)
        return round_advance.round_advance(*given, out=self.empty(nodes.shape, np.int32))

    def no_candidates(self, requests: int):
        shape = (requests, 0, 0)
        return self.empty(shape, np.int32), self.empty(shape, F32)
