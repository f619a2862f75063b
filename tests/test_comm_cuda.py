"""Ranks that have a GPU each: what a round means whose calls were ended."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.all_reduce_call import ABORTED
from ddtree_numba.model.comm_cuda import NcclComm, PeerComm
from ddtree_numba.model.comm_tcp import RankLost


@pytest.mark.parametrize("kind", [PeerComm, NcclComm])
def test_c02_a_round_that_an_abort_ended_has_no_results(kind):
    comm = object.__new__(kind)
    comm.group = SimpleNamespace(failure=None, lost=lambda: RankLost("rank 1 is gone"))
    comm.judge(np.zeros(1, np.uint32))
    comm.group.failure = "rank 1 is gone"
    with pytest.raises(RankLost, match="rank 1 is gone"):
        comm.judge(np.array([ABORTED], np.uint32))
