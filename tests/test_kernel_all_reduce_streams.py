"""The all-reduce and all-gather kernels with ranks as streams of one process on one GPU."""

import time

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from bench.soak import Soak, fill
from ddtree_numba.kernels.all_reduce import METHODS, all_reduce
from ddtree_numba.model.peer_memory import self_test
from ddtree_numba.spec import all_reduce as spec
from ddtree_numba.spec.numerics import BF16

from .peer_streams import captured, peer_streams
from .test_kernel_all_reduce import wide

pytestmark = pytest.mark.gpu


@pytest.fixture
def streams(request):
    """streams(world): memories that are joined; closed afterwards."""
    with peer_streams(request.config) as make:
        yield make


@pytest.mark.parametrize("world", [pytest.param(1, id="small-1"), 2, 3, 4, 8, 16])
def test_the_self_test_passes(world, streams):
    assert self_test(streams(world)) == []


def test_the_self_test_sees_another_order(streams, monkeypatch):
    ordered = spec.all_reduce
    monkeypatch.setattr(spec, "all_reduce", lambda partials: ordered(partials[::-1]))
    wrong = self_test(streams(8), sizes=[243_712])
    assert len(wrong) == 4 * 8 and "values differ from the sum in rank order" in wrong[0]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_100_000_calls_with_random_delays(world, streams, record_property):
    soaks = [Soak(memory, rows=(1, 9, 17), blocks=8) for memory in streams(world)]
    for soak in soaks:
        soak.run()
    for soak in soaks:
        soak.memory.stream.synchronize()
        soak.capture()
    begun, replays = time.perf_counter(), -(-100_000 // len(soaks[0].steps))
    for number in range(replays):
        for soak in soaks:
            soak.replay()
        if number % 50 == 0:
            soaks[0].memory.stream.synchronize()
    results = [soak.result() for soak in soaks]
    seconds = time.perf_counter() - begun
    record_property("summary", f"exchange, {world} ranks, {seconds:.1f} s: {results[0]}")
    for result in results:
        assert result["calls"] >= 100_000 and result["failure"] is None
        assert result["wrong"] == 0
        assert result["different_in_reverse"] > 0 or world == 2  # a + b = b + a


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_peer_ends_the_graph_within_the_limit(method, streams, rng):
    import cupy

    memory, _ = streams(2, limit=100_000_000)
    with memory.stream:
        x = cupy.asarray(wide(rng, 17, 7168))

    def work():
        for _ in range(100):
            all_reduce(x, memory.peers, out=x, method=method, stream=memory.stream)

    graph = captured(memory, work)
    begun = time.perf_counter()
    graph.launch(memory.stream)
    memory.stream.synchronize()
    assert 0.09 < time.perf_counter() - begun < 0.5
    assert memory.peers.failure() == "rank 0: rank 1 did not come within 0.1 s"


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_ends_the_graph_at_once(method, streams, rng):
    import cupy

    memory, _ = streams(2)
    with memory.stream:
        x = cupy.asarray(wide(rng, 17, 7168))
        for _ in range(10):
            all_reduce(x, memory.peers, out=x, method=method, stream=memory.stream)
    time.sleep(0.05)
    assert not memory.stream.done
    begun = time.perf_counter()
    memory.abort()
    memory.stream.synchronize()
    assert time.perf_counter() - begun < 0.1
    assert memory.peers.failure() == "rank 0: its wait for rank 1 was aborted"


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_is_late_once_is_not_late_for_ever(method, streams, record_property):
    """As it was while all warps read the abort word, across the bus, after 256 polls."""
    import cupy

    late, calls, graphs = 4_000_000, 200, []  # a third of it, of rank 0
    memories = streams(2, blocks=60)
    for memory in memories:
        with memory.stream:
            x, counts = cupy.zeros((17, 7168), BF16), cupy.zeros(3, np.uint32)
        fill.ready()

        def work(memory=memory, x=x, counts=counts) -> None:
            fill.launch(
                1, x, counts, 8, memory.rank, (1 - memory.rank) * late, stream=memory.stream
            )
            for _ in range(calls):
                all_reduce(x, memory.peers, out=x, method=method, stream=memory.stream)

        graphs.append(captured(memory, work))
    begun = time.perf_counter()
    for memory, graph in zip(memories, graphs, strict=True):
        graph.launch(memory.stream)
    for memory in memories:
        memory.stream.synchronize()
    each = (time.perf_counter() - begun) / calls * 1e6
    record_property("summary", f"{method}, 17 rows behind a late call: {each:.1f} us a call")
    assert each < 60
