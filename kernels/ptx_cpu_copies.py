"""What asynchronous copies do on the CPU executor; names as in `ptx.py`."""

from ddtree_numba.kernels.simt_memory import Pointer
from ddtree_numba.kernels.simt_threads import Fault, now

# Copies are performed by the wait, so that a missing one shows


def copy16(address: int, x: Pointer, index: int) -> None:
    copy16_part(address, x, index, 16)


def copy16_part(address: int, x: Pointer, index: int, size: int) -> None:
    if not 0 <= size <= 16:
        raise Fault(f"copy of {size} bytes out of 16")
    if size:
        x.memory.check(x.byte(index), 16 if size == 16 else 1)
        x.memory.touched(x.byte(index), size)
    now.block.shared.begin_copy(int(address), 16)
    now.thread.open_copies.append((int(address), x, x.byte(index), int(size)))


def copy_commit() -> None:
    thread = now.thread
    thread.copy_groups.append(thread.open_copies)
    thread.open_copies = []


def copy_wait(latest: int) -> None:
    groups = now.thread.copy_groups
    while len(groups) > latest:
        for address, x, start, size in groups.pop(0):
            data = bytes(x.memory.bytes[start : start + size]) if size else b""
            now.block.shared.end_copy(address, data.ljust(16, b"\0"))
