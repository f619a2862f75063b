"""What a rank of `all_reduce` and `all_gather` knows: memory that its peers reach, its own state.

Each rank owns a region of device memory (or of pinned host memory) that all ranks read and write.
A region holds lines, then flags, then pieces, lines and pieces twice: see `all_reduce_call.py`.
Regions are zeroed once, before any rank's first call. A region may be memory of this device, of
another one, or of another process; the kernels only see its address.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddtree_numba.kernels.all_reduce_call import (
    ABORTED,
    CONTROL_WORDS,
    ERROR,
    LATE,
    MOST_RANKS,
)
from ddtree_numba.kernels.all_reduce_lines import UNIT
from ddtree_numba.kernels.all_reduce_pull import FLAGS, MOST_BLOCKS, PIECE
from ddtree_numba.kernels.arguments import require

LINE_WORDS, PIECE_WORDS = 4, PIECE // 4
LIMIT = 30_000_000_000  # ns: no step takes as long, and nobody wants to wait longer
PATIENCE = 1 << 14  # polls: 10 to 20 ms
BLOCKS = 128  # of a launch: all are resident, with room for the kernels around it


@dataclass(frozen=True)
class Room:
    """What a region holds of one call: lines of 16 bytes, and 16-byte pieces."""

    lines: int
    pieces: int

    @classmethod
    def of(cls, world: int, one_shot: int, two_shots: int, pull: int) -> "Room":
        """Room for payloads of so many bytes by each way; larger ones go in parts."""
        part = -(-two_shots // (UNIT * world))
        lines = max(-(-one_shot // UNIT) * world, 2 * world * part)
        return cls(lines, -(-pull // PIECE))

    @property
    def line_words(self) -> int:
        return 2 * self.lines * LINE_WORDS

    @property
    def words(self) -> int:
        """uint32 words of a region."""
        return self.line_words + FLAGS + 2 * self.pieces * PIECE_WORDS

    def payload(self, world: int, pull: bool, shots: int) -> int:
        """Most bytes of a call, a multiple of 16."""
        if pull:
            return self.pieces * PIECE
        units = self.lines // world if shots == 1 else self.lines // (2 * world) * world
        return units * UNIT // PIECE * PIECE


@dataclass(frozen=True)
class Peers:
    """One rank's view. The launches of all ranks must be able to run at the same time; room, blocks
    and link are the same for all, since method and grid follow from them.

    regions: of every rank in rank order, uint32[room.words]. control: uint32[32] of this rank's
    device, zeroed. abort: one uint32 that the host can set while a kernel runs. limit: nanoseconds
    that a wait may last. patience: polls of a wait between two looks at clock and abort word.
    blocks: of a launch at most; of ranks that share a device, a share. early: the kernel behind may
    start before all ranks are there; not where ranks share a device, whose other ranks' blocks it
    could keep out. link: what the regions are reached over, nvlink, pcie or host.
    """

    rank: int
    regions: tuple[Any, ...]
    room: Room
    control: Any
    abort: Any
    limit: int = LIMIT
    patience: int = PATIENCE
    blocks: int = BLOCKS
    early: bool = True
    link: str = "nvlink"

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MOST_RANKS:
            raise ValueError(f"regions: {self.world} ranks, from 1 to {MOST_RANKS} are possible")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank: {self.rank} of {self.world}")
        if not 1 <= self.blocks <= MOST_BLOCKS:
            raise ValueError(f"blocks: {self.blocks}, from 1 to {MOST_BLOCKS} are possible")
        for region in self.regions:
            require("region", region, (self.room.words,), "uint32")
        require("control", self.control, (CONTROL_WORDS,), "uint32")

    @property
    def world(self) -> int:
        return len(self.regions)

    @cached_property
    def lines(self) -> tuple[Any, ...]:
        """Every rank's part of lines, as 16 arguments of a kernel."""
        return self._padded([region[: self.room.line_words] for region in self.regions])

    @cached_property
    def pulls(self) -> tuple[Any, ...]:
        """Every rank's flags and pieces, as 16 arguments of a kernel."""
        return self._padded([region[self.room.line_words :] for region in self.regions])

    def _padded(self, parts: list) -> tuple[Any, ...]:
        return (*parts, *[None] * (MOST_RANKS - len(parts)))

    @property
    def fault(self) -> Any:
        """uint32[1] on the device: not 0 once a call has ended without its result."""
        return self.control[ERROR : ERROR + 1]

    def failure(self) -> str | None:
        """Why a call ended without its result, or None. Reads the error word: synchronises."""
        return self.meaning(int(self.control[ERROR]))

    def meaning(self, word: int) -> str | None:
        """What an error word says."""
        if word & 0xFF == ABORTED:
            return f"rank {self.rank}: its wait for rank {word >> 8} was aborted"
        if word & 0xFF == LATE:
            seconds = self.limit / 1e9
            return f"rank {self.rank}: rank {word >> 8} did not come within {seconds:g} s"
        return None
