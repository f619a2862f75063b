"""The k likeliest tokens of each draft position; see `spec/draft_topk.py`.

First launch: the greatest logit of every warp's tokens. At least k tokens reach the k-th greatest
of these maxima, and few more. Second launch: every block finds a bound close below that one, lists
those of its tokens that reach it, and adds up masses, which need the row's maximum. The last block
of a row orders its list and writes ids and log-probabilities. Where great logits stand side by side
or are equal, a list overflows; the last block then goes through the whole row by itself, which
takes longer and gives the same.

A vocabulary in shards: a mass is a rounded integer relative to the maximum of the whole row and
cannot be rescaled, so the shards exchange their maxima first (`draft_maxima`); then each adds up
its masses and orders its list (`draft_shard`), both are exchanged, and `draft_merge` gives
what one row of the whole vocabulary would: keys hold global ids, and sums of integers are the same
in any grouping.
"""

from dataclasses import dataclass

from numba import float32

from ddtree_numba.kernels.arguments import bf16, element_of, require
from ddtree_numba.kernels.draft_finish import KEPT, SLOTS, make_finish
from ddtree_numba.kernels.draft_passes import (
    MOST,
    MOST_MERGED,
    STATE,
    THREADS,
    each_of,
    make_maxima,
    make_merge,
)
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.numerics import LAST_ID
from ddtree_numba.kernels.vocabulary import QUAD, blocks_of


@dataclass(frozen=True)
class Shape:
    """Threads of a block, tokens of a thread (None: by the vocabulary), keys that a block may list,
    keys that the last block holds: at least k, a multiple of 4. Results are the same for all."""

    threads: int = THREADS
    each: int | None = None
    slots: int = SLOTS
    kept: int = KEPT

    def of(self, vocabulary: int) -> tuple[int, int]:
        """Tokens of a thread, blocks of a row."""
        each = self.each or each_of(vocabulary)
        return each, blocks_of(vocabulary, self.threads, each)

    def maxima(self, vocabulary: int) -> int:
        return self.of(vocabulary)[1] * self.threads // 32

    def listed(self, vocabulary: int) -> int:
        return self.of(vocabulary)[1] * self.slots


PRODUCT = Shape()


def workspace_words(rows: int, vocabulary: int, shape: Shape = PRODUCT) -> int:
    """int64 words for rows of so many tokens; zeros before the first call, and left as zeros
    where that matters."""
    return rows * (1 + STATE + shape.maxima(vocabulary) + shape.listed(vocabulary))


def _parts(workspace, rows: int, vocabulary: int, shape: Shape) -> list:
    """The workspace as greatest keys, state, maxima, lists."""
    least = workspace_words(rows, vocabulary, shape)
    require("workspace", workspace, (max(len(workspace), least),), "int64")
    ends = [0, rows, rows * (1 + STATE), rows * (1 + STATE + shape.maxima(vocabulary))]
    return [workspace[a:b] for a, b in zip(ends, [*ends[1:], least], strict=True)]


def _checked(logits, k: int) -> tuple[int, int]:
    """Rows and tokens."""
    if logits.ndim != 3 or not 0 < logits.shape[2] <= LAST_ID:
        raise ValueError(f"logits: shape {logits.shape}, expected [requests, depths, vocabulary]")
    require("logits", logits, logits.shape)
    if not 0 <= k <= MOST:
        raise ValueError(f"k: {k}, expected 0 .. {MOST}")
    return logits.shape[0] * logits.shape[1], logits.shape[2]


def draft_maxima(
    logits, k: int, first_id: int = 0, *, workspace, shape: Shape = PRODUCT, stream=None
):
    """First pass over a shard whose first token is first_id; returns each row's greatest key.

    int64[rows], a part of the workspace: to be gathered over the shards for the second pass.
    """
    rows, vocabulary = _checked(logits, k)
    tops, state, maxima, _ = _parts(workspace, rows, vocabulary, shape)
    if not 0 <= first_id <= LAST_ID - vocabulary:
        raise ValueError(f"first_id: {first_id}, expected 0 .. {LAST_ID - vocabulary}")
    each, blocks = shape.of(vocabulary)
    body = make_maxima(element_of("logits", logits), vocabulary % QUAD == 0, each, shape.threads)
    body.launch((blocks, rows), logits, vocabulary, first_id, tops, state, maxima, stream=stream)
    return tops


def _finish(logits, k, tops, results, sharded, workspace, shape, stream) -> None:
    rows, vocabulary = _checked(logits, k)
    own_tops, state, maxima, lists = _parts(workspace, rows, vocabulary, shape)
    each, blocks = shape.of(vocabulary)
    body = make_finish(
        element_of("logits", logits),
        vocabulary % QUAD == 0,
        each,
        sharded,
        shape.threads,
        shape.slots,
        shape.kept,
    )
    body.launch(
        (blocks, rows),
        logits,
        vocabulary,
        k,
        own_tops if tops is None else tops,
        1 if tops is None else len(tops),
        own_tops,
        state,
        maxima,
        lists,
        *results,
        stream=stream,
    )


def draft_topk(logits, k: int, *, workspace, out, shape: Shape = PRODUCT, stream=None):
    """(token_ids, log_probs) of the k likeliest tokens of each row into out; returns out."""
    k = min(k, logits.shape[-1])
    rows, _ = _checked(logits, k)
    token_ids, log_probs = out
    require("token_ids", token_ids, (*logits.shape[:2], k), "int32")
    require("log_probs", log_probs, (*logits.shape[:2], k), "float32")
    if k and rows:
        draft_maxima(logits, k, workspace=workspace, shape=shape, stream=stream)
        _finish(logits, k, None, (None, *out), False, workspace, shape, stream)
    return out


def draft_shard(logits, k: int, tops, *, workspace, out, shape: Shape = PRODUCT, stream=None):
    """Second pass over a shard. tops: int64[shards, rows], gathered from the first pass.

    out: int64[rows, k + 1]: keys in descending order, 0 where the shard has no more tokens, and
    behind them its mass. Returns out.
    """
    rows, _ = _checked(logits, k)
    require("tops", tops, (len(tops), rows), "int64")
    require("out", out, (rows, k + 1), "int64")
    _finish(logits, k, tops, (out, None, None), True, workspace, shape, stream)
    return out


def draft_merge(records, tops, *, out, stream=None):
    """(token_ids, log_probs) of the whole vocabulary from gathered shards, into out; returns out.

    records: int64[shards, rows, k + 1], tops: int64[shards, rows]. out: [R, L, k] with R L rows.
    """
    shards, rows, k = *records.shape[:2], records.shape[2] - 1
    token_ids, log_probs = out
    require("records", records, records.shape, "int64")
    require("tops", tops, (shards, rows), "int64")
    require("token_ids", token_ids, token_ids.shape, "int32")
    require("log_probs", log_probs, token_ids.shape, "float32")
    if token_ids.size != rows * k or token_ids.shape[-1] != k:
        raise ValueError(f"token_ids: shape {token_ids.shape} does not hold {rows} rows of {k}")
    if shards * k > MOST_MERGED:
        raise ValueError(f"records: {shards} shards of {k}, at most {MOST_MERGED} in all")
    make_merge().launch(rows, records, tops, shards, k, token_ids, log_probs, stream=stream)
    return out


def instances() -> list[Kernel]:
    """float32 logits are the product's; its ranks hold shards."""
    made = [make_merge()]
    made += [make_maxima(*kind) for kind in ((float32, True, 16), (float32, True, 4))]
    made += [make_finish(float32, True, 16, False), make_finish(float32, True, 4, False)]
    made += [make_finish(float32, True, 4, True), make_finish(float32, True, 16, True)]
    return made + [make_maxima(bf16, True, 16), make_finish(bf16, True, 16, False)]
