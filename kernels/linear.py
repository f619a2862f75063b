"""Linear layer on the device; see `spec/linear.py`.

Two kernels that add in the same order (`linear_order.py`): `linear_narrow.py` for few tokens, which
reads the weight at the rate of the memory, and `linear_wide.py` for many. The number of tokens and
the weight's shape pick one of them, its tile, and whether blocks share K and leave their sums to be
added by a second launch; no bit of a result depends on that choice.

x, weight bfloat16, K and the distance of rows of x multiples of 8; out bfloat16 or float32. The
workspace is float32, of any shape, with `workspace_floats` elements.
"""

from typing import NamedTuple

from numba import float32

from ddtree_numba.kernels import linear_narrow, linear_wide
from ddtree_numba.kernels.arguments import bf16, element_of, require, rows_of
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.linear_order import Order, order_of
from ddtree_numba.kernels.linear_wide import Tile
from ddtree_numba.spec.numerics import BF16, F32

COLUMNS = (1, 2, 3, 4, 5, 9)  # tiles of 8 tokens that the narrow kernel takes at once
NINE_SLICES = 6  # of a group, at least, for nine tiles: with fewer, wide blocks are quicker
WARPS = 8  # of a narrow block, unless it has more slices
MOST_STACK = 4  # tiles of 16 weight rows in a narrow block
CHIP = 132  # multiprocessors; a chip of another size has the same bits from a less apt tile
# Weight rows x tokens: 64 x 128, 128 x 96, 64 x 64.
LARGE, FLAT, SMALL = Tile(8, 2, 2, 3), Tile(6, 4, 2, 3), Tile(4, 2, 2, 4)


class Way(NamedTuple):
    """How the blocks share the work."""

    wide: Tile | None  # None: the narrow kernel
    columns: int  # of the narrow kernel
    parts: int  # blocks along K, whose sums meet in the workspace


def way_of(tokens: int, outs: int, width: int) -> Way:
    """The way that `linear` takes for tokens through a weight[outs, width]."""
    order = order_of(outs, width)
    narrow = COLUMNS if order.slices >= NINE_SLICES else COLUMNS[:-1]
    if tokens <= 8 * narrow[-1]:
        return Way(None, next(n for n in narrow if tokens <= 8 * n), order.groups)
    large, flat, small = (order.groups * tile.number(tokens, outs) for tile in (LARGE, FLAT, SMALL))
    shared = order.groups == 1 and 2 * small <= CHIP
    tile = LARGE
    # Slices that do not fill K are the embedded model's alone, for which one tile is enough.
    if order.width == width and not shared:
        if large < CHIP:
            tile = SMALL
        elif order.groups == 1 and flat <= CHIP < large:
            tile = FLAT  # all at once, where some multiprocessors had two large ones
    return Way(tile, 0, order.slices if shared else order.groups)


def workspace_floats(tokens: int, outs: int, width: int) -> int:
    """Elements of the workspace that so many tokens need; 0 for none."""
    parts = way_of(tokens, outs, width).parts
    return parts * tokens * outs if parts > 1 else 0


def linear(x, weight, out_dtype=None, *, out, workspace=None, stream=None, way: Way | None = None):
    """x[.., K] times weight[N, K] transposed, into out[.., N]; returns out.

    Rows of x may lie apart. out_dtype, if given, is what out must have. way: `way_of` the sizes,
    unless a test wants another one.
    """
    tokens, _, _ = rows_through(x, weight)
    outs, width = weight.shape
    require("out", out, (*x.shape[:-1], outs), *([out_dtype] if out_dtype else []))
    if not tokens:
        return out
    way = way or way_of(tokens, outs, width)
    if way.parts == 1:
        product(x, weight, way, out, stream)
        return out
    needed = way.parts * tokens * outs
    if workspace is None or workspace.size < needed:
        raise ValueError(f"workspace: {tokens} rows need {needed} float32")
    require("workspace", workspace, workspace.shape, F32)
    product(x, weight, way, workspace, stream)
    count = tokens * outs
    grid = -(-count // linear_wide.THREADS)
    adding = linear_wide.make_sum(element_of("out", out))
    adding.launch(grid, workspace, out, count, way.parts, stream=stream)
    return out


def rows_through(x, weight) -> tuple[int, int, int]:
    """`rows_of` x, which with the weight is checked."""
    outs, width = weight.shape
    tokens, inner, stride = rows_of("x", x)
    if inner != width:
        raise ValueError(f"weight {weight.shape} does not fit rows of {x.shape}")
    if x.dtype != BF16:
        raise ValueError(f"x: dtype {x.dtype}, expected bfloat16")
    require("weight", weight, (outs, width), BF16)
    if width % 8 or stride % 8 or not width:
        raise ValueError(f"x: rows of {width}, {stride} apart, expected multiples of 8")
    return tokens, width, stride


def product(x, weight, way: Way, out, stream=None) -> None:
    """The launch that multiplies: into out, or each part's sums into float32[parts, tokens, outs].

    What is given has been checked.
    """
    tokens, width, stride = rows_of("x", x)
    outs, order = len(weight), order_of(*weight.shape)
    body, grid, slices = _body(way, order, element_of("out", out), tokens, outs, width)
    more = [slices] if way.wide else []
    sizes = (tokens, outs, width, order.units, *more)
    body.launch(grid, x, stride, weight, out, *sizes, stream=stream)


def _body(way: Way, order: Order, element, tokens: int, outs: int, width: int):
    """The kernel, its grid, and the slices that a wide block walks."""
    exact = order.width == width
    if way.wide is None:
        stack = min(max(WARPS // order.slices, 1), MOST_STACK)
        body = linear_narrow.make(order.slices, stack, way.columns, element, exact)
        rows, tokens_each = stack * linear_narrow.ROWS, 8 * way.columns
        return body, (-(-outs // rows), -(-tokens // tokens_each), way.parts), 0
    tile = way.wide
    body = linear_wide.make(tile, element, exact)
    slices = order.slices if way.parts == order.groups else 1
    return body, (-(-tokens // tile.tokens), -(-outs // tile.rows), way.parts), slices


# [N, K] of K2.6 at TP = 8, whose kernels serve the other TP sizes too; the drafter; the embedded
# model; the logits of both.
SHAPES = [(2112, 7168), (1536, 1536), (512, 7168), (4608, 7168)]
SHAPES += [(7168, width) for width in (256, 1024, 2304, 43008)]
TINY = [(176, 192), (192, 64), (192, 512)]
LOGITS = [(20480, 7168), (2048, 192)]


def instances() -> list[Kernel]:
    """What these shapes use, each kernel once."""
    made = {}
    cases = [(shape, bf16) for shape in SHAPES + TINY] + [(shape, float32) for shape in LOGITS]
    for (outs, width), element in cases:
        for tokens in (*(8 * n for n in COLUMNS), 256, 1024):
            way, order = way_of(tokens, outs, width), order_of(outs, width)
            target = element if way.parts == 1 else float32
            body, _, _ = _body(way, order, target, tokens, outs, width)
            made[body.name] = body
            if way.parts > 1:
                adding = linear_wide.make_sum(element)
                made[adding.name] = adding
    return list(made.values())
