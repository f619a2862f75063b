"""A query's two parts in one launch; see `spec/absorb_rope.py`.

The kernel of `absorb`, with further blocks along its columns that do what `rope` does: the two
share nothing but the launch. A thread there turns eight columns of one row of a head.
"""

from ddtree_numba.kernels.absorb import SIDE, WARP, make, shape_of, steps_of, tokens_each
from ddtree_numba.kernels.arguments import require
from ddtree_numba.kernels.vector import WIDTH


def absorb_rope(q, weight, positions, table, *, out, stream=None):
    """out[t, h] = [q[t, h, :a] times weight[h] | q[t, h, a:] turned]; returns out.

    table: `rope_table`. Rows of q and out may lie apart.
    """
    heads, ins, outs = shape_of(weight)
    tokens, turned = q.shape[0], table.shape[-1]
    slices = -(-ins // SIDE)
    threads = WARP * slices
    if tuple(q.shape[1:]) != (heads, ins + turned):
        raise ValueError(f"q: shape {q.shape}, expected {(tokens, heads, ins + turned)}")
    if tuple(out.shape) != (tokens, heads, outs + turned):
        raise ValueError(f"out: shape {out.shape}, expected {(tokens, heads, outs + turned)}")
    if turned % WIDTH or not 0 < turned <= threads * WIDTH:
        most = threads * WIDTH
        raise ValueError(f"table: rows of {turned}, expected a multiple of {WIDTH}, at most {most}")
    require("positions", positions, (tokens,), "int32")
    require("table", table, (len(table), turned), "float32")
    each = tokens_each(tokens)
    lines = threads // (turned // WIDTH)
    blocks = -(-outs // SIDE) + -(-min(each, tokens) // lines)
    make(slices, turned).launch(
        (blocks, heads, -(-tokens // each)),
        *(q, *steps_of("q", q), weight, out, *steps_of("out", out)),
        *(tokens, ins, outs, each, positions, table, len(table)),
        stream=stream,
    )
    return out
