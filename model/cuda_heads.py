"""Candidates and tokens of logits whose vocabulary is cut over ranks, without gathering the logits.

    gather(x), gather(x, joined=True): what all ranks have of x, as `spec/all_gather.py` has it

Every rank calls the same with its own part, and all get the bits that whole rows give. A rank sends
8 bytes a row for its greatest key and 8 (k + 1) for its candidates, and 8 for its token; V / W
logits of 4 bytes otherwise, which is what top-k, top-p and min-p still need.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.kernels.all_gather import all_gather
from ddtree_numba.kernels.draft_topk import (
    draft_maxima,
    draft_merge,
    draft_shard,
    workspace_words,
)
from ddtree_numba.kernels.next_token import next_token_merge, next_token_shard
from ddtree_numba.kernels.next_token import workspace_words as token_words
from ddtree_numba.kernels.peers import Peers
from ddtree_numba.model.cuda_arrays import Array
from ddtree_numba.spec.numerics import F32

Gather = Callable[..., Array]


def gather_over(peers: Peers, ops: Any) -> Gather:
    """`gather` over the memory of a host's ranks."""

    def gather(x: Array, joined: bool = False) -> Array:
        *rows, width = x.shape
        shape = (*rows, peers.world * width) if joined else (peers.world, *x.shape)
        return all_gather(x, peers, out=ops.empty(shape, x.dtype))

    return gather


def sharded_topk(part: Array, k: int, first_id: int, gather: Gather, ops: Any):
    """Logits [R,L,V/W] of the tokens from first_id on -> `draft_topk` of [R,L,V]; k of 1 to 64."""
    requests, depths, width = part.shape
    rows = requests * depths
    space = ops.workspace("draft_shard", workspace_words(rows, width), rows)
    tops = gather(draft_maxima(part, k, first_id, workspace=space))
    shape = requests, depths, min(k, len(tops) * width)
    record = ops.empty((rows, shape[2] + 1), np.int64)
    records = gather(draft_shard(part, shape[2], tops, workspace=space, out=record))
    return draft_merge(records, tops, out=(ops.empty(shape, np.int32), ops.empty(shape, F32)))


def sharded_next_token(
    part: Array, positions: Array, draws: Any, first_id: int, gather: Gather, ops: Any
):
    """Logits [M,V/W] of the tokens from first_id on -> `next_token` of [M,V].

    positions: int64[M], of the drawn tokens. ValueError for draws with top-k, top-p or min-p.
    """
    rows = len(part)
    space = ops.workspace("next_token", token_words(rows, False))
    keys = next_token_shard(
        *(part, positions, draws.seeds, draws.settings, first_id),
        workspace=space,
        out=ops.empty((rows,), np.int64),
    )
    return next_token_merge(gather(keys), out=ops.empty((rows,), np.int32))
