"""Barriers of the CPU executor at which arriving and waiting are two things.

A named barrier counts those who arrive beside those who wait (`Block.arrivals`); a barrier in
shared memory counts arrivals alone, phase after phase (`Block.phases`). Who waits learns what the
others had done before they arrived, and no more.
"""

from dataclasses import dataclass, field

from ddtree_numba.kernels.simt_threads import Fault, now


def arrive(number: int, count: int) -> None:
    """Be counted at barrier `number` and go on; what the warp did before is known to who waits."""
    thread = now.thread
    arrivals = thread.block.arrivals.setdefault(number, [])
    arrivals.append((count, thread, list(thread.warp.clock)))
    if len(arrivals) > count:
        raise Fault(f"barrier {number}: {len(arrivals)} arrivals for {count} threads")


@dataclass
class Phase:
    """A barrier in shared memory: phases of `count` arrivals, one after another."""

    count: int
    arrived: int = 0
    ended: int = 0  # phases
    gathered: list[int] = field(default_factory=list)  # clocks of those that have arrived
    known: list[int] = field(default_factory=list)  # .. by the end of the last phase

    def arrive(self) -> None:
        clock = now.thread.warp.clock
        self.gathered = [max(pair) for pair in zip(self.gathered or clock, clock, strict=True)]
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.ended, self.known = 0, self.ended + 1, self.gathered

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity has ended; then what came before it is known."""
        if self.ended & 1 == parity:
            return False
        warp = now.thread.warp
        warp.clock = [max(pair) for pair in zip(warp.clock, self.known, strict=True)]
        return True
