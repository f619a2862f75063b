"""Sums and gathers over ranks that are processes, through TCP connections to rank 0.

Rank 0 takes what every rank gives, in rank order, joins it, and gives the result to all: a sum is
added once, by the specification, so its bits are those of `ThreadComm`, and equal on every rank. A
rank waits for no rank but rank 0, so whichever dies is noticed there. All messages carry the number
of their call: ranks that no longer do the same are told apart from slow ones.
"""

import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddtree_numba.model.comm import Sound, Traffic
from ddtree_numba.spec.all_reduce import all_reduce

HEADER = struct.Struct("<IIQ")  # kind, number of the call, bytes that follow
KINDS = ("all_reduce", "all_gather", "broadcast", "gather")
TICK = 0.5  # seconds between looks at how long a rank has been silent


class RankError(ConnectionError):
    """A rank that failed, or does something else than the others; one line."""


class RankLost(RankError):
    """Another rank failed, and rank 0 knows of it."""


class LeaderLost(RankLost):
    """Rank 0 is gone."""


class TcpComm(Sound):
    """One rank's connections: rank 0 has one to every other rank, the others one to rank 0.

    lost(rank) makes the error for a connection that broke, heard(rank) counts signs of life that a
    rank gave elsewhere. Rank 0 raises RankError for a rank that is silent for `seconds`; the others
    wait for rank 0 as long as it lives.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        links: dict[int, socket.socket],
        seconds: float,
        lost: Callable[[int], RankError],
        heard: Callable[[int], int],
    ) -> None:
        self.rank, self.world, self.links = rank, world, links
        self.seconds, self.lost, self.heard = seconds, lost, heard
        self.others = range(1, world)
        self.traffic = Traffic()
        self._number = 0
        for link in links.values():
            link.settimeout(None if rank else TICK)

    def all_reduce(self, partial: np.ndarray) -> np.ndarray:
        """Sum [T,H] over ranks, in rank order, in float32, rounded once."""
        return self._meet("all_reduce", partial, partial.shape, _total)

    def all_gather(self, part: np.ndarray) -> np.ndarray:
        """Join the ranks' parts along the last axis, in rank order."""
        shape = (*part.shape[:-1], part.shape[-1] * self.world)
        return self._meet("all_gather", part, shape, _joined)

    def broadcast(self, payload: bytes = b"") -> bytes:
        """What rank 0 gave, on every rank."""
        self._number += 1
        if self.rank:
            return bytes(self._take(0, "broadcast"))
        for rank in self.others:
            self._give(rank, "broadcast", payload)
        return payload

    def gather(self, own: bytes) -> list[bytes]:
        """What every rank gave, in rank order, on every rank; a barrier as well."""
        self._number += 1
        lengths = struct.Struct(f"<{self.world}Q")
        if self.rank:
            self._give(0, "gather", own)
            joined = bytes(self._take(0, "gather"))
            head, joined = lengths.unpack(joined[: lengths.size]), joined[lengths.size :]
            ends = np.cumsum([0, *head]).tolist()
            return [joined[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        given = [own, *(bytes(self._take(rank, "gather")) for rank in self.others)]
        message = lengths.pack(*map(len, given)) + b"".join(given)
        for rank in self.others:
            self._give(rank, "gather", message)
        return given

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.gather(b"")

    def close(self) -> None:
        """Wake whoever waits on a connection, in any thread."""
        for link in self.links.values():
            with contextlib.suppress(OSError):  # it is closed already
                link.shutdown(socket.SHUT_RDWR)

    def _meet(
        self,
        kind: str,
        own: np.ndarray,
        shape: tuple[int, ...],
        join: Callable[[Sequence[np.ndarray]], np.ndarray],
    ) -> np.ndarray:
        """join(what every rank gave), of this shape, on every rank."""
        self._number += 1
        self.traffic.count(own)
        if self.rank:
            self._give(0, kind, _bytes(own))
            size = own.dtype.itemsize * int(np.prod(shape))
            return np.frombuffer(self._take(0, kind, size), own.dtype).reshape(shape)
        given = [own]
        for rank in self.others:
            taken = np.frombuffer(self._take(rank, kind, own.nbytes), own.dtype)
            given.append(taken.reshape(own.shape))
        joined = join(given)
        for rank in self.others:
            self._give(rank, kind, _bytes(joined))
        return joined

    def _give(self, rank: int, kind: str, payload: bytes | memoryview) -> None:
        left = memoryview(HEADER.pack(KINDS.index(kind), self._number, len(payload)) + payload)
        while left:
            left = left[self._patiently(rank, self.links[rank].send, left) :]

    def _take(self, rank: int, kind: str, size: int | None = None) -> bytearray:
        """The rank's part of this call, of `size` bytes if that is known."""
        code, number, length = HEADER.unpack(self._read(rank, HEADER.size))
        expected = KINDS.index(kind), self._number, length if size is None else size
        if (code, number, length) != expected:
            other = KINDS[code] if code < len(KINDS) else f"kind {code}"
            raise RankError(
                f"rank {rank} is at call {number}, {other} of {length} bytes; rank {self.rank} at"
                f" call {self._number}, {kind}{'' if size is None else f' of {size} bytes'}"
            )
        return self._read(rank, length)

    def _read(self, rank: int, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            left = left[self._patiently(rank, self.links[rank].recv_into, left) :]
        return data

    def _patiently(self, rank: int, move: Callable[[memoryview], int], data: memoryview) -> int:
        """move(data), bytes moved, unless the rank is lost or silent for too long."""
        waited, heard = 0.0, self.heard(rank)
        while True:
            try:
                count = move(data)
            except TimeoutError:
                # ticks, not a clock: a run that was stopped and continued has not waited meanwhile
                waited += TICK
                if self.heard(rank) != heard:
                    waited, heard = 0.0, self.heard(rank)
                if waited > self.seconds:
                    raise RankError(
                        f"rank {rank} has not answered for {self.seconds:g} s"
                    ) from None
                continue
            except OSError:
                count = 0
            if not count:
                raise self.lost(rank)
            return count


def _bytes(array: np.ndarray) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _total(partials: Sequence[np.ndarray]) -> np.ndarray:
    return all_reduce(np.stack(partials))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, axis=-1)
