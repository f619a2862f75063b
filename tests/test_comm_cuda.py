"""Ranks that have a GPU each: how they meet, and what a round means whose calls were ended."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.all_reduce_call import ABORTED
from ddtree_numba.kernels.driver import DeviceError
from ddtree_numba.model import comm_cuda
from ddtree_numba.model.comm_cuda import NcclComm, PeerComm
from ddtree_numba.model.comm_tcp import RankError, RankLost


@pytest.mark.parametrize("kind", [PeerComm, NcclComm])
def test_c02_a_round_that_an_abort_ended_has_no_results(kind):
    comm = object.__new__(kind)
    comm.group = SimpleNamespace(failure=None, lost=lambda: RankLost("rank 1 is gone"))
    comm.judge(np.zeros(1, np.uint32))
    comm.group.failure = "rank 1 is gone"
    with pytest.raises(RankLost, match="rank 1 is gone"):
        comm.judge(np.array([ABORTED], np.uint32))


def test_a_round_over_nccl_that_never_ends_is_given_up():
    comm = object.__new__(NcclComm)
    comm.group = SimpleNamespace(place=SimpleNamespace(seconds=0.01))
    with pytest.raises(RankError, match="a round has not ended within 0.01 s: a rank has stopped"):
        comm.wait(SimpleNamespace(done=False))
    comm.wait(SimpleNamespace(done=True))


@pytest.fixture
def meeting(monkeypatch):
    """meeting(way, machines, fast, broken): what `connected` takes, and its notes."""

    def run(way="", machines=1, fast=False, broken=False):
        notes: list[str] = []
        monkeypatch.setenv("DDTREE_NUMBA_MEETING", way)

        def peers(*_):
            if broken:
                raise DeviceError("no memory for all_reduce")

        made = SimpleNamespace(abort=None, leave=None)
        monkeypatch.setattr(comm_cuda, "peer_memory", peers)
        for name in ("PeerComm", "NcclComm"):
            kind = SimpleNamespace(**vars(made), name=name)
            monkeypatch.setattr(comm_cuda, name, lambda *_, kind=kind: kind)
        comm = SimpleNamespace(
            broadcast=lambda own: own, gather=lambda own: [b"%d" % i for i in range(machines)]
        )
        group = SimpleNamespace(comm=comm, stops=[], farewells=[])
        return comm_cuda.connected(group, None, 192, fast, notes.append).name, notes

    return run


def test_ranks_of_one_machine_meet_in_memory_if_they_can(meeting):
    assert meeting() == ("PeerComm", [])
    assert meeting("nccl") == ("NcclComm", [])
    assert meeting(broken=True) == ("NcclComm", ["ranks: no memory for all_reduce"])
    with pytest.raises(DeviceError, match="no memory for all_reduce"):
        meeting("host", broken=True)


def test_a_way_that_cannot_be_is_refused(meeting):
    assert meeting(machines=2) == meeting(fast=True) == ("NcclComm", [])
    with pytest.raises(ValueError, match="MEETING device: with 2 machines ranks meet through NCCL"):
        meeting("device", machines=2)
    with pytest.raises(ValueError, match="MEETING host: with --fast-allreduce ranks meet"):
        meeting("host", fast=True)
