"""Sum over the ranks in rank order on the device; see `spec/all_reduce.py`.

A rank gives its own partial; the others' come through memory that all of them reach, `peers.py`.
Every rank makes the same calls in the same order. All methods add in float32, in rank order, and
round once, so they give the same bits, and a call may take any of them:

| method         | bytes sent by a rank, payload P | trips between ranks |                         |
|----------------|---------------------------------|---------------------|-------------------------|
| lines          | 2 (W - 1) P                     | 1                   | `all_reduce_lines.py`   |
| lines_two_shot | 4 (W - 1) / W P                 | 2                   |                         |
| pull           | (W - 1) P                       | 1, and a flag       | `all_reduce_pull.py`    |
| pull_two_shot  | 2 (W - 1) / W P                 | 2, and two flags    |                         |

The kernels may start before the kernel ahead has ended (they wait for it first), and two buffers
still suffice, as long as every kernel that starts early waits for the one ahead in all its blocks:
then a call's writes come after the end of all that is ahead of it on the stream.
"""

from collections.abc import Iterator

from numba import float32

from ddtree_numba.kernels import all_reduce_lines, all_reduce_pull
from ddtree_numba.kernels.all_reduce_lines import UNIT
from ddtree_numba.kernels.all_reduce_pull import PIECE
from ddtree_numba.kernels.arguments import bf16, element_of, require
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.kernels.peers import Peers

METHODS = ("lines", "lines_two_shot", "pull", "pull_two_shot")
EACH = 4  # pieces of a thread that pulls, at least: fewer blocks have fewer flags to wait for
# us of a small payload by each method, and bytes a us that a rank sends: measured between two H200
# over NVLink, estimated for PCIe between peers and for pinned host memory.
LINKS = {
    "nvlink": ((2.2, 3.3, 4.3, 7.0), 320_000),
    "pcie": ((4.0, 6.5, 8.0, 14.0), 45_000),
    "host": ((5.0, 9.3, 8.0, 14.0), 32_000),
}


def estimates(world: int, size: int, link: str) -> dict[str, float]:
    """us of a call with `size` bytes, by method."""
    others = world - 1
    sent = (2 * others, 4 * others / world, others, 2 * others / world)
    small, rate = LINKS[link]
    times = (us + times * size / rate for us, times in zip(small, sent, strict=True))
    return dict(zip(METHODS, times, strict=True))


def choose(world: int, size: int, link: str = "nvlink") -> str:
    """The method for a payload of `size` bytes."""
    times = estimates(world, size, link)
    return min(times, key=times.__getitem__)


def even_blocks(items: int, threads: int, most: int) -> int:
    """Blocks that share the items evenly: as few rounds as possible, then as few blocks."""
    rounds = max(-(-items // (threads * most)), 1)
    return -(-items // (threads * rounds))


def launches(
    x, peers: Peers, out, method: str | None = None
) -> Iterator[tuple[Kernel, int, tuple]]:
    """(kernel, grid, arguments) of every launch of a call: several where the room is too small."""
    world, size = peers.world, x.size * x.itemsize
    element = element_of("x", x)
    method = method or choose(world, size, peers.link)
    if method not in METHODS:
        raise ValueError(f"method: {method!r}, expected one of {', '.join(METHODS)}")
    require("x", x, x.shape)
    require("out", out, x.shape, x.dtype)
    if size % PIECE:
        raise ValueError(f"x: {size} bytes, expected a multiple of {PIECE}")
    pull, shots = method.startswith("pull"), 2 if method.endswith("two_shot") else 1
    module, parts, unit = (
        (all_reduce_pull, peers.pulls, PIECE) if pull else (all_reduce_lines, peers.lines, UNIT)
    )
    kernel = module.make(world, element, shots)
    half = 4 * (peers.room.pieces if pull else peers.room.lines)
    most = peers.room.payload(world, pull, shots) // x.itemsize
    if size and not most:
        raise ValueError(f"room: none for method {method}")
    x, out = x.reshape(-1), out.reshape(-1)
    for first in range(0, x.size, most or 1):
        some, there = x[first : first + most], out[first : first + most]
        units = some.size * x.itemsize // unit
        items = -(-units // (EACH if pull else world if shots == 2 else 1))
        grid = even_blocks(items, kernel.threads, peers.blocks)
        fixed = peers.control, peers.abort, peers.limit, peers.patience, peers.rank
        mine = parts[peers.rank]
        yield kernel, grid, (some, there, *parts, mine, *fixed, units, half, int(peers.early))


def all_reduce(x, peers: Peers, *, out, method: str | None = None, stream=None):
    """The sum of all ranks' x, the same on every rank, into out, which may be x; returns out.

    method: one of METHODS, by default the fastest for the size. x of 16 bytes or a multiple.
    """
    for kernel, grid, arguments in launches(x, peers, out, method):
        kernel.launch(grid, *arguments, stream=stream)
    return out


def ready(world: int, element) -> None:
    """Load the kernels of all methods. Loading may wait for whatever runs on the device, and so for
    a rank that waits for this one: every rank does it before the first call."""
    for module in (all_reduce_lines, all_reduce_pull):
        for shots in (1, 2):
            module.make(world, element, shots).ready()


def instances() -> list[Kernel]:
    """K2.6 at 2, 4 and 8 ranks; the embedded model has the same, and runs on the CPU in float32."""
    made = []
    for world in (2, 4, 8):
        for shots in (1, 2):
            made += [
                all_reduce_lines.make(world, bf16, shots),
                all_reduce_pull.make(world, bf16, shots),
            ]
    return [*made, all_reduce_lines.make(2, float32, 1), all_reduce_pull.make(2, float32, 2)]
