"""The token that follows each row of logits; see `spec/next_token.py`.

Greedy rows take one launch: the greatest key of a row, over all its blocks. Rows that are drawn
without filters take one as well, the race. With filters, the greatest key comes first, then
top-k and top-p each narrow down the lowest key that stays (`selection.py`), then the race.

A vocabulary in shards, without filters: each shard gives its winner's key (`next_token_shard`), and
`next_token_merge` takes the greatest, 8 bytes a row instead of its logits. Filters rank the whole
row, so they need its logits in one place.
"""

from dataclasses import dataclass

from numba import float32

from ddtree_numba.kernels import selection
from ddtree_numba.kernels.arguments import bf16, element_of, require
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.next_passes import make, make_merge
from ddtree_numba.kernels.numerics import LAST_ID
from ddtree_numba.kernels.row_settings import Settings
from ddtree_numba.kernels.selection import EACH, LEVEL_BITS, STATE
from ddtree_numba.kernels.vocabulary import QUAD, THREADS, blocks_of


@dataclass(frozen=True)
class Shape:
    """Threads of a block, bins (2**bits) of a selecting launch: tokens are the same for all."""

    threads: int = THREADS
    bits: int = LEVEL_BITS


PRODUCT = Shape()


def workspace_words(rows: int, filters: bool, shape: Shape = PRODUCT) -> int:
    """int64 words of a workspace for so many rows; it starts as zeros and is left as zeros."""
    return rows * (STATE + (1 << shape.bits if filters else 0))


def next_token(
    logits, positions, seeds, params: Settings, *, workspace, out, shape=PRODUCT, stream=None
):
    """The next token of each row into out, -1 where the row holds no distribution; returns out."""
    rows, width = logits.shape
    require("out", out, (rows,), "int32")
    filters = params.ranked or params.massed
    run = _passes(logits, positions, seeds, params, 0, workspace, filters, shape, stream)
    if not params.sampled:
        run("greedy", None, out)
    elif not (filters or params.cut):
        run("race", None, out)
    else:
        run("top", None, None)
        for weighted in [False] * params.ranked + [True] * params.massed:
            _select(logits, params, weighted, workspace, shape, stream)
        run("filtered", None, out)
    return out


def next_token_shard(
    logits,
    positions,
    seeds,
    params: Settings,
    first_id: int,
    *,
    workspace,
    out,
    shape=PRODUCT,
    stream=None,
):
    """The winner's key of each row into out, int64[rows]; the shard begins at token first_id."""
    require("out", out, logits.shape[:1], "int64")
    if params.ranked or params.massed or params.cut:
        raise ValueError("params: top_k, top_p and min_p need rows of the whole vocabulary")
    run = _passes(logits, positions, seeds, params, first_id, workspace, False, shape, stream)
    run("race" if params.sampled else "greedy", out, None)
    return out


def next_token_merge(keys, *, out, stream=None):
    """The next token of each row from the shards' keys [shards, rows], into out; returns out."""
    shards, rows = keys.shape
    require("keys", keys, (shards, rows), "int64")
    require("out", out, (rows,), "int32")
    make_merge().launch(-(-rows // THREADS), keys, shards, rows, out, stream=stream)
    return out


def _passes(logits, positions, seeds, params, first_id, workspace, filters, shape, stream):
    """run(kind, keys, tokens): one pass over checked arguments."""
    rows, width = logits.shape
    require("logits", logits, (rows, width))
    require("positions", positions, (rows,), "int64")
    require("seeds", seeds, (rows,), "uint64")
    if not 0 < width <= LAST_ID:
        raise ValueError(f"logits: {width} tokens, expected 1 .. {LAST_ID}")
    if not 0 <= first_id <= LAST_ID - width or first_id % QUAD:
        most = LAST_ID - width
        raise ValueError(f"first_id: {first_id}, expected a multiple of {QUAD} up to {most}")
    least = workspace_words(rows, filters, shape)
    require("workspace", workspace, (max(len(workspace), least),), "int64")
    element, aligned = element_of("logits", logits), width % QUAD == 0

    def run(kind: str, keys, tokens) -> None:
        make(element, aligned, kind, keys is not None, shape.threads).launch(
            (blocks_of(width, shape.threads, EACH), rows),
            logits,
            width,
            first_id,
            positions,
            seeds,
            params.temperature,
            params.min_p,
            workspace,
            keys,
            tokens,
            stream=stream,
        )

    return run


def _select(logits, params, weighted: bool, workspace, shape, stream) -> None:
    """The lowest key that stays, into the workspace: by count (top-k) or by mass (top-p)."""
    rows, width = logits.shape
    body = selection.make(
        element_of("logits", logits), width % QUAD == 0, weighted, shape.threads, shape.bits
    )
    for level in range(selection.levels(shape.bits)):
        body.launch(
            (blocks_of(width, shape.threads, EACH), rows),
            logits,
            width,
            rows,
            level,
            params.temperature,
            params.top_k,
            params.share,
            workspace,
            stream=stream,
        )


def instances() -> list[Kernel]:
    """float32 logits are the product's; its ranks hold shards."""
    made = [make(float32, True, kind) for kind in ("greedy", "top", "race", "filtered")]
    made += [make(float32, True, kind, True) for kind in ("greedy", "race")] + [make_merge()]
    made += [selection.make(float32, True, weighted) for weighted in (False, True)]
    return made + [make(bf16, True, "greedy")]
