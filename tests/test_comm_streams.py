"""Ranks as streams of one GPU, with numpy in its place: who waits for whom, what each gets."""

import threading

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.model.comm_streams import StreamGroup, along_rows
from ddtree_numba.model.cuda_backend import CudaBackend
from tests import fake_cupy


@pytest.fixture
def group():
    with fake_cupy.installed():
        yield StreamGroup([CudaBackend() for _ in range(3)])


def test_every_rank_gets_what_all_gave(group):
    def work(rank):
        comm = group.comms[rank]
        x = np.full((2, 4), rank, np.float32)
        return comm.gather(x), comm.gather(x, joined=True), comm.all_gather(x)

    for stacked, joined, gathered in group.run(work):
        assert stacked.shape == (3, 2, 4) and [part.min() for part in stacked] == [0, 1, 2]
        assert joined.tolist() == gathered.tolist() == 2 * [4 * [0] + 4 * [1] + 4 * [2]]
    assert group.comms[1].traffic.calls == 3 and group.comms[1].traffic.bytes == 3 * 32


def test_rank_0_is_the_calling_thread_and_the_others_come_back_to_it(group):
    streams = [ops.stream for ops in group.backends]
    waited = []
    for rank, stream in enumerate(streams):
        stream.wait_event = lambda event, rank=rank: waited.append(rank)
    threads = group.run(lambda rank: threading.current_thread())
    assert [each is threading.current_thread() for each in threads] == [True, False, False]
    assert sorted(waited) == [0, 0, 1, 2]  # the others for the begin, rank 0 for their ends


def test_a_meeting_is_waited_for_before_and_behind(group):
    order = []
    for rank, ops in enumerate(group.backends):
        ops.stream.wait_event = lambda event, rank=rank: order.append((rank, "waits"))
        ops.copy = lambda source, out, rank=rank: order.append((rank, "copies"))
    group.run(lambda rank: group.comms[rank].gather(np.zeros(4, np.float32)))
    for rank in range(3):
        own = [what for who, what in order if who == rank]
        assert own[rank > 0 :][:7] == 2 * ["waits"] + 3 * ["copies"] + 2 * ["waits"]


def test_the_first_failure_is_raised_and_frees_the_others(group):
    def work(rank):
        if rank == 1:
            raise ZeroDivisionError
        return group.comms[rank].gather(np.zeros(4, np.float32))

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            group.run(work)
    assert len(group.run(lambda rank: group.comms[rank].gather(np.zeros(4, np.float32)))) == 3


def test_what_follows_a_failure_follows_all_that_was_started(group):
    waited = []
    group.backends[0].stream.wait_event = waited.append
    with pytest.raises(ZeroDivisionError):
        group.run(lambda rank: 1 // (2 - rank))
    assert len(waited) == 2  # for the ends of ranks 1 and 2


def test_parts_side_by_side():
    parts = np.arange(24).reshape(3, 2, 2, 2)
    wanted = np.concatenate(list(parts), axis=-1)
    assert np.array_equal(along_rows(parts), wanted)
