"""What every rank has, on every rank, over the memory of `peers.py`; see `spec/all_gather.py`.

It shares regions, control block and the count of calls with `all_reduce.py`: calls of both follow
each other in any order, the same on every rank. Small payloads go by lines, pushed to all others in
one trip; large ones are laid out and pulled, half the bytes for one more meeting of the ranks.

Both methods write an element where it belongs. In units (8 bytes of a line, or pieces of 16), with
`width` of them in a row, unit i of rank s goes to i + width ((W - 1) (i // width) + s): joined
along the last axis a row is one of x's, stacked it is all of x.
"""

from collections.abc import Iterator

import numpy as np

from ddtree_numba.kernels import all_gather_lines, all_gather_pull
from ddtree_numba.kernels.all_reduce import EACH, estimates, even_blocks
from ddtree_numba.kernels.all_reduce_lines import UNIT
from ddtree_numba.kernels.all_reduce_pull import PIECE
from ddtree_numba.kernels.arguments import require
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.peers import Peers

METHODS = ("lines", "pull")


def choose(world: int, size: int, link: str = "nvlink") -> str:
    """The method for `size` bytes of each rank: as many are sent as by the sum in one shot."""
    times = estimates(world, size, link)
    return min(METHODS, key=times.__getitem__)


def _row(x, out, world: int) -> int:
    """Bytes that lie together in out: a row of x where out joins rows, else all of x."""
    joined = x.ndim > 0 and out.ndim == x.ndim
    shape = (*x.shape[:-1], world * x.shape[-1]) if joined else (world, *x.shape)
    require("x", x, x.shape)
    require("out", out, shape, x.dtype)
    row = (x.shape[-1] if joined else x.size) * x.itemsize
    if row % UNIT:
        raise ValueError(f"x: {row} bytes {'a row' * joined or 'in all'}, no multiple of {UNIT}")
    return row


def launches(
    x, peers: Peers, out, method: str | None = None
) -> Iterator[tuple[Kernel, int, tuple]]:
    """(kernel, grid, arguments) of every launch of a call: several where the room is too small."""
    world, size = peers.world, x.size * x.itemsize
    row = _row(x, out, world)
    if method is None:
        method = "lines" if row % PIECE else choose(world, size, peers.link)
    if method not in METHODS:
        raise ValueError(f"method: {method!r}, expected one of {', '.join(METHODS)}")
    pull = method == "pull"
    if pull and row % PIECE:
        raise ValueError(f"x: rows of {row} bytes cannot be pulled, no multiple of {PIECE}")
    module, parts, unit = (
        (all_gather_pull, peers.pulls, PIECE) if pull else (all_gather_lines, peers.lines, UNIT)
    )
    kernel = module.make(world)
    half = 4 * (peers.room.pieces if pull else peers.room.lines)
    most = peers.room.payload(world, pull, 1) // unit
    if size and not most:
        raise ValueError(f"room: none for method {method}")
    x, out = (array.reshape(-1).view(np.uint32) for array in (x, out))
    units = size // unit
    for before in range(0, units, most or 1):
        some = min(units - before, most)
        grid = even_blocks(-(-some // (EACH if pull else 1)), kernel.threads, peers.blocks)
        fixed = peers.control, peers.abort, peers.limit, peers.patience, peers.rank
        spans = before, some, row // unit, half, int(peers.early)
        yield kernel, grid, (x, out, *parts, parts[peers.rank], *fixed, *spans)


def all_gather(x, peers: Peers, *, out, method: str | None = None, stream=None):
    """Every rank's x into out, the same on every rank; returns out.

    x: any dtype. out: [W, *x.shape], stacked, or x's shape with W times its last axis, joined.
    What lies together, x or its rows, is a multiple of 8 bytes, of 16 to be pulled; both arrays
    begin at one of 16.
    method: one of METHODS, by default the fastest for the size.
    """
    for kernel, grid, arguments in launches(x, peers, out, method):
        kernel.launch(grid, *arguments, stream=stream)
    return out


def ready(world: int) -> None:
    """Load the kernels of both methods, as `ready` of `all_reduce.py` does."""
    for module in (all_gather_lines, all_gather_pull):
        module.make(world).ready()


def instances() -> list[Kernel]:
    """K2.6 at 2, 4 and 8 ranks; the embedded model has the same."""
    return [m.make(world) for world in (2, 4, 8) for m in (all_gather_lines, all_gather_pull)]
