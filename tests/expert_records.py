"""Arguments of the expert kernels from those of the specification, and running them."""

import numpy as np

from ddtree_numba.kernels import moe_int4 as kernels
from ddtree_numba.kernels import moe_tiles
from ddtree_numba.kernels.moe_int4 import moe_int4, workspace
from ddtree_numba.kernels.moe_records import pack, records_shape, refuse
from ddtree_numba.spec.numerics import F32, Int4Matrix
from tests.gpu_arrays import to_host

ROWS = ("x", "experts", "weights", "base")  # arguments with a row a token


def packed(matrix: Int4Matrix, gated: bool, zeros=np.zeros):
    faults = zeros(len(matrix.packed), np.int32)
    out = zeros(records_shape(len(matrix.packed), matrix.shape, gated), np.uint32)
    made = pack(matrix, gated, faults=faults, out=out)
    refuse("weights", to_host(faults) if zeros is not np.zeros else faults)
    return made


def on_device(given, zeros=np.zeros):
    """The arguments of the kernel: records instead of matrices."""
    both = packed(given["gate_up"], True, zeros), packed(given["down"], False, zeros)
    return given | dict(zip(("gate_up", "down"), both, strict=True))


def run(x, experts, weights, gate_up, down, base=None, allocate=np.empty):
    space = workspace(*experts.shape, down, allocate)
    out = allocate(x.shape, x.dtype)
    assert moe_int4(x, experts, weights, gate_up, down, base, workspace=space, out=out) is out
    return out


def part(given, rows):
    return given | {n: given[n][rows] for n in ROWS if given[n] is not None}


def sums(program, width, x, experts, records, tiles=None):
    """float32 sums of the first row tiles, a row a pair."""
    count, total = experts.size, len(records.words)
    plan, pairs, items = experts, None, count
    if width:
        items = moe_tiles.most_tiles(count, total, width)
        plan, pairs = np.empty(1 + items, np.int32), np.empty(items * width, np.int32)
        moe_tiles.make(width).launch(1, experts, plan, pairs, count, total)
    tiles = tiles or records.words.shape[1]
    out = np.empty((count, 16 * tiles), F32)
    numbers = count, experts.shape[1], total
    kernels._run(program, items, (0, tiles), x, records, plan, pairs, out, numbers, None)
    return out
