"""What asynchronous copies and split barriers do on the CPU executor; names as in `ptx.py`."""

from ddtree_numba.kernels.simt_barriers import Phase, arrive
from ddtree_numba.kernels.simt_memory import Pointer
from ddtree_numba.kernels.simt_threads import Fault, barrier, look_again, meet, now, order_lanes

# --- asynchronous copies: performed by the wait, so that a missing one shows


def copy16(address: int, x: Pointer, index: int) -> None:
    copy16_part(address, x, index, 16)


copy16_l2 = copy16


def copy16_part(address: int, x: Pointer, index: int, size: int) -> None:
    if not 0 <= size <= 16:
        raise Fault(f"copy of {size} bytes out of 16")
    if size:
        x.memory.check(x.byte(index), 16 if size == 16 else 1)
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


# --- barriers in shared memory


def mbarrier_init(address: int, count: int) -> None:
    now.block.phases[int(address)] = Phase(int(count))


def copy_arrive(address: int) -> None:
    """The thread's copies are performed at once; who sees the phase end may read them."""
    copy_commit()
    copy_wait(0)
    meet(order_lanes, None)
    now.block.phases[int(address)].arrive()


def mbarrier_passed(address: int, parity: int) -> int:
    look_again()
    return int(now.block.phases[int(address)].passed(int(parity)))


def bar_wait(number, count):
    barrier(int(number), int(count))


def bar_arrive(number, count):
    meet(order_lanes, None)
    arrive(int(number), int(count))
