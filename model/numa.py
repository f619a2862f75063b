"""A rank's threads beside its GPU: on the processors of the same NUMA node."""

import os
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind(bus_id: str, devices: Path = PCI_DEVICES) -> set[int]:
    """Keep this thread, and those that it starts, on the processors next to a PCI device.

    -> the processors; none, and nothing is changed, where the system does not tell, or where this
    process may use none of them.
    """
    try:
        text = (devices / bus_id.lower() / "local_cpulist").read_text()
    except OSError:
        return set()
    allowed = processors(text) & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
    return allowed


def processors(text: str) -> set[int]:
    """The kernel's lists of processors: "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
