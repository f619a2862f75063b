"""Exchange memory: what processes open of each other, what a group does when some of it fails."""

import gc
import threading

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.driver import DeviceError
from ddtree_numba.kernels.peers import Room
from ddtree_numba.model import peer_memory
from ddtree_numba.model.peer_regions import GRANULE, HostRegion


class Meeting:
    """`gather` of ranks that are threads."""

    def __init__(self, world):
        self.barrier, self.given = threading.Barrier(world, timeout=20), [b""] * world

    def gather(self, rank):
        def gather(payload):
            self.given[rank] = payload
            self.barrier.wait()
            given = list(self.given)
            self.barrier.wait()
            return given

        return gather


class FakeMemory:
    """A PeerMemory whose making, joining and test fail where they are told to."""

    failing: dict = {}  # (where, rank): (stage, message)
    closed: list = []

    def __init__(self, rank, world, room, where, **options):
        self.rank, self.where = rank, where
        self.at("make")

    def at(self, stage):
        failing, message = self.failing.get((self.where, self.rank), ("", ""))
        if failing == stage:
            raise DeviceError(message)

    def join_processes(self, gather):
        gather(b"handle")
        self.at("join")

    def close(self):
        self.closed.append((self.where, self.rank))


@pytest.fixture
def connected(monkeypatch):
    """connected(failing): what `connect` gives each of three ranks, or its error."""

    def tested(memories):
        stage, message = FakeMemory.failing.get((memories[0].where, memories[0].rank), ("", ""))
        return [message] if stage == "test" else []

    monkeypatch.setattr(peer_memory, "PeerMemory", FakeMemory)
    monkeypatch.setattr(peer_memory, "self_test", tested)

    def run(failing):
        FakeMemory.failing, FakeMemory.closed = failing, []
        meeting, found = Meeting(3), [None] * 3

        def work(rank):
            try:
                found[rank] = peer_memory.connect(rank, 3, Room(1, 1), meeting.gather(rank))
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return run


def test_device_memory_is_taken_where_it_works(connected):
    found = connected({})
    assert [memory.where for memory, _ in found] == 3 * ["device"]
    assert all(wrong == [] for _, wrong in found)


@pytest.mark.parametrize("stage", ["make", "join", "test"])
def test_c01_one_rank_that_fails_takes_all_to_host_memory(connected, stage):
    found = connected({("device", 1): (stage, "no way")})
    assert [memory.where for memory, _ in found] == 3 * ["host"]
    assert all(wrong == ["device memory, rank 1: no way"] for _, wrong in found)
    assert set(FakeMemory.closed) >= {("device", 0), ("device", 2)}


def test_c01_where_nothing_works_all_reasons_are_named(connected):
    errors = connected({("device", 0): ("join", "far away"), ("host", 2): ("test", "7 values")})
    for error in errors:
        assert isinstance(error, DeviceError)
        assert str(error) == (
            "no memory for all_reduce: device memory, rank 0: far away; "
            "host memory, rank 2: 7 values"
        )


def test_a_region_of_the_host_is_seen_by_who_opens_it(monkeypatch):
    from cupy.cuda import runtime

    registered = []
    monkeypatch.setattr(runtime, "hostRegister", lambda *given: registered.append(given))
    monkeypatch.setattr(runtime, "hostUnregister", lambda address: None)
    one, other = HostRegion(100), HostRegion(GRANULE + 1)

    def words(address, size):
        import ctypes

        return np.frombuffer((ctypes.c_char * size).from_address(address), np.uint32)

    opened = other.open(one.handle())
    words(one.address, one.size)[5] = 42
    seen = words(opened, one.size)
    assert seen[5] == 42 and seen.sum() == 42 and opened != one.address
    assert [size for _, size, _ in registered] == [GRANULE, 2 * GRANULE, GRANULE]
    del seen
    handle = one.handle()
    one.close()
    gc.collect()
    with pytest.raises(DeviceError, match="host memory of process"):
        other.open(handle)
    other.close()
