"""Choice of experts on the device; see `spec/router.py`.

Weights are the 16 rows of the mma, tokens its 8 columns. First launch: a warp keeps the weights of
32 or 64 experts and 128 columns in registers, loaded before the kernel ahead has ended, and all
tokens stream past them; a block's warps add up. Second launch: a warp a row adds what the blocks
left, takes the sigmoid, and picks.

The order of a sum follows from the width alone: pieces of 128 columns, each a chain of mma; 7
pieces a run, added in order; runs added in order. The sigmoid is 1 / (1 + 2**(-x log2 e)) by
ex2.approx and rcp.approx, its relative error below 5e-7 + |x| 1e-7.
"""

from ddtree_numba.kernels.arguments import require
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.router_passes import (
    ROWS,
    TOKENS,
    WARP,
    each_of,
    make_choice,
    make_sums,
    runs_of,
)
from ddtree_numba.spec.numerics import BF16

MOST_EXPERTS = 1024  # 32 scores a lane
MOST_PICKED = WARP  # a lane a pick
FEW, MANY = 40, 512  # rows: up to FEW, and from MANY on


def shape_of(rows: int) -> tuple[int, int]:
    """Tiles of experts a block, and blocks that share the rows."""
    if rows <= FEW:
        return 2, 1
    return 4, 2 if rows < MANY else 5


def workspace_words(rows: int, width: int, experts: int) -> int:
    """int64 words for a call with so many rows; they need no value."""
    return runs_of(width) * rows * WARP // 2 * each_of(experts)


def router(h, gate, bias, k: int, scaling: float, sizes=None, *, workspace, out, stream=None):
    """(experts int32, weights float32) [T, k] of every row of h into out; returns out.

    sizes: int32[R], or None: of the T / R rows of each request how many are real.
    """
    rows, width = h.shape
    count, nodes = len(gate), 0
    if sizes is not None:
        require("sizes", sizes, sizes.shape, "int32")
        if not len(sizes) or rows % len(sizes):
            raise ValueError(f"sizes: {len(sizes)} of {rows} rows, which are no multiple")
        nodes = rows // len(sizes)
    require("h", h, (rows, width), BF16)
    require("gate", gate, (count, width), BF16)
    require("bias", bias, (count,), "float32")
    if width % 8:
        raise ValueError(f"h: rows of {width}, expected a multiple of 8")
    if not 1 <= count <= MOST_EXPERTS:
        raise ValueError(f"gate: {count} experts, expected 1 .. {MOST_EXPERTS}")
    if not 1 <= k <= min(count, MOST_PICKED):
        raise ValueError(f"cannot pick {k} of {count} experts, at most {MOST_PICKED}")
    experts, weights = out
    require("experts", experts, (rows, k), "int32")
    require("weights", weights, (rows, k), "float32")
    words = workspace_words(rows, width, count)
    require("workspace", workspace, (max(len(workspace), words),), "int64")
    tiles, shares = shape_of(rows)
    sums = workspace[:words].view("float32")
    grid = -(-count // (ROWS * tiles)) * runs_of(width), min(shares, -(-rows // TOKENS))
    make_sums(width, count, tiles).launch(grid, h, gate, sums, rows, stream=stream)
    make_choice(width, count).launch(
        rows, sums, rows, bias, k, scaling, sizes, nodes, experts, weights, stream=stream
    )
    return out


def instances() -> list[Kernel]:
    """Of K2.6 and the embedded model."""
    shapes = (7168, 384), (192, 12)
    made = [make_sums(*shape, tiles) for shape in shapes for tiles in (2, 4)]
    return made + [make_choice(*shape) for shape in shapes]
