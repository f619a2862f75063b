"""Random numbers for every kind of tensor of a checkpoint, at the speed of a disk."""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 1 << 24  # elements of a block that repeats
PIECE = 1 << 25  # bytes, at most, of what is written at once
ITEMSIZE = {"F32": 4, "I32": 4, "BF16": 2}
DEVIATION = 4.6  # of uniform values of -8 .. 7


class Tensor(NamedTuple):
    """`full` is the content of a weight_shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    full: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * ITEMSIZE[self.dtype]


class Numbers:
    """Content as a function of seed and name.

    Matrices deviate by hidden ** -0.5, INT4 ones too; norms are in 0.5 .. 1.5, biases of the
    router's selection in -0.2 .. 0.2. Matrices start somewhere in a block and go on cyclically.
    """

    def __init__(self, seed: int, hidden: int, largest: int) -> None:
        rng = np.random.default_rng(seed)
        count = min(BLOCK, largest) | 1  # odd, so that the rows of a large matrix differ
        deviation = np.float32(hidden**-0.5)
        values = deviation * rng.standard_normal(count, np.float32)
        scales = deviation * rng.uniform(0.5 / DEVIATION, 1.5 / DEVIATION, count)
        self.seed = seed
        self.words = rng.integers(0, 1 << 32, count, np.uint32)  # each eight values of -8 .. 7
        self.values = bits(values)
        self.scales = bits(scales)

    def pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor, at most PIECE at a time."""
        start = zlib.crc32(f"{self.seed} {tensor.name}".encode())
        if tensor.full is not None or len(tensor.shape) == 1:
            yield memoryview(self._vector(tensor, start)).cast("B")
            return
        block = self.scales if tensor.name.endswith("weight_scale") else self.values
        block = self.words if tensor.dtype == "I32" else block
        raw = memoryview(block).cast("B")
        left, position = tensor.nbytes, start % len(block) * block.itemsize
        while left:
            size = min(left, PIECE, len(raw) - position)
            yield raw[position : position + size]
            left, position = left - size, (position + size) % len(raw)

    def _vector(self, tensor: Tensor, start: int) -> np.ndarray:
        if tensor.full is not None:
            return np.array(tensor.full, np.int32)
        rng = np.random.default_rng(start)
        if tensor.dtype == "F32":
            return rng.uniform(-0.2, 0.2, tensor.shape).astype(np.float32)
        return bits(rng.uniform(0.5, 1.5, tensor.shape))


def bits(values: np.ndarray) -> np.ndarray:
    """As bfloat16, in uint16: numpy gives out no memory of bfloat16."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)
