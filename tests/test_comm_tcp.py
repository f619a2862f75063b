"""Sums and gathers over sockets, how ranks find one another, and what rank 0 announces."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from ddtree_numba import wire
from ddtree_numba.budget import StepTimes
from ddtree_numba.model.comm import ThreadGroup
from ddtree_numba.model.comm_tcp import RankError, TcpComm
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.place import Place, from_environment, gpus_are_shared
from ddtree_numba.model.rendezvous import meet
from ddtree_numba.model.watch import ProcessGroup
from ddtree_numba.sampling import SamplingParams
from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.verbs import Plan
from tests.process_runs import free_port

RIGHT = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"}


def together(*works: Callable[[], object]) -> list:
    """What each gives or raises, in threads of its own."""
    results: list = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except RankError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@contextlib.contextmanager
def comms(world: int, seconds: float = 30):
    pairs = [socket.socketpair() for _ in range(1, world)]
    links = [{rank: pair[0] for rank, pair in enumerate(pairs, 1)}, *({0: p[1]} for p in pairs)]
    lost = [lambda rank: RankError(f"rank {rank} is gone")] * world
    yield [TcpComm(r, world, links[r], seconds, lost[r], lambda _: 0) for r in range(world)]
    for pair in pairs:
        for link in pair:
            link.close()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_bits_are_those_of_ranks_as_threads(rng, world: int, dtype):
    shape = world, 100, 192
    partials = (rng.standard_normal(shape) * np.exp2(rng.integers(-32, 32, shape))).astype(dtype)
    group = ThreadGroup(world)
    calls = ("all_reduce", "all_gather")

    def rounds(comm) -> list[np.ndarray]:
        return [
            getattr(comm, call)(partials[comm.rank, :rows]) for call in calls for rows in (100, 0)
        ]

    wanted = group.run(lambda rank: rounds(group.comms[rank]))
    with comms(world) as apart:
        got = together(*[lambda comm=comm: rounds(comm) for comm in apart])
        assert len({(c.traffic.calls, c.traffic.bytes) for c in (*apart, *group.comms)}) == 1
    for one, other in zip(wanted, got, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    backwards = [partials[rank] for rank in reversed(range(world))]
    other = group.run(lambda rank: group.comms[rank].all_reduce(backwards[rank]))[0]
    assert world == 2 or other.tobytes() != wanted[0][0].tobytes()  # so the order does show


def test_bytes_are_gathered_and_broadcast():
    def work(comm: TcpComm) -> tuple:
        told = comm.broadcast(b"news" * 100_000 if comm.rank == 0 else b"")
        comm.barrier()
        return told, comm.gather(b"x" * comm.rank)

    with comms(4) as apart:
        got = together(*[lambda comm=comm: work(comm) for comm in apart])
    assert got == [(b"news" * 100_000, [b"", b"x", b"xx", b"xxx"])] * 4


def test_s34_ranks_that_do_different_things_are_told():
    ones = np.ones((2, 8), F32)
    with comms(2) as (leader, other):
        got = together(lambda: leader.all_reduce(ones), lambda: other._give(0, "gather", b""))
    assert str(got[0]) == (
        "rank 1 is at call 0, gather of 0 bytes; rank 0 at call 1, all_reduce of 64 bytes"
    )


def test_c02_a_silent_rank_is_named():
    with comms(3, seconds=0.2) as apart:
        got = together(apart[0].barrier, lambda: apart[1]._give(0, "gather", b""))
    assert "rank 1 is at call 0" in str(got[0])
    with comms(2, seconds=0.2) as (leader, _):
        assert str(together(leader.barrier)[0]) == "rank 1 has not answered for 0.2 s"


def test_c02_a_lost_rank_is_named():
    with comms(3) as apart:
        apart[2].links[0].close()
        got = together(apart[0].barrier, apart[1].barrier, lambda: apart[0].close())
    assert str(got[1]) == "rank 0 is gone" and str(got[0]).endswith("is gone")


def place(rank: int, world: int, port: int, **named) -> Place:
    named = {"seconds": 5.0, "address": "127.0.0.1", **named}
    return Place(rank, world, rank, port=port, **named)


def close(*results) -> None:
    for links in results:
        for kinds in links.values():
            for link in kinds.values():
                link.close()


def test_c04_ranks_meet_whatever_else_knocks():
    port = free_port()

    def stranger() -> None:
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(100) == b""

    def last() -> object:
        time.sleep(0.4)  # until then the others stand at the door
        return meet(place(2, 3, port))

    leader, one, two, stray, wrong, _ = together(
        lambda: meet(place(0, 3, port)),
        lambda: meet(place(1, 3, port)),
        last,
        lambda: meet(place(1, 3, port, job="another")),
        lambda: meet(place(2, 4, port)),
        stranger,
    )
    assert {rank: sorted(kinds) for rank, kinds in leader.items()} == {
        rank: ["control", "data"] for rank in (1, 2)
    }
    close(leader, one, two)
    refused = f"rank 0 at 127.0.0.1:{port} refused this rank: "
    assert str(stray) == refused + "it belongs to another run"
    assert str(wrong) == refused + "rank 2 has WORLD_SIZE 4, rank 0 has 3"


def test_c04_who_is_missing_and_who_was_refused_is_named():
    port = free_port()
    leader, other, stray = together(
        lambda: meet(place(0, 4, port, seconds=1.0)),
        lambda: meet(place(2, 4, port, seconds=1.0)),
        lambda: meet(place(1, 2, port, seconds=1.0)),
    )
    at = f"rank 0 at 127.0.0.1:{port}"
    why = "rank 1 has WORLD_SIZE 2, rank 0 has 4"
    assert str(leader) == (
        f"ranks 1, 3 of 4 did not reach {at} within 1 s; refused 127.0.0.1: {why}"
    )
    assert str(other) == "rank 0 ended before all ranks had met"
    assert str(stray) == f"{at} refused this rank: {why}"


def test_c02_what_fails_while_ranks_take_leave_is_named():
    port = free_port()

    def leads() -> None:
        with ProcessGroup(place(0, 2, port)) as group:
            group.farewells.append(group.comm.barrier)

    def fails() -> None:
        raise RankError("the GPU is gone")

    def follows() -> None:
        with ProcessGroup(place(1, 2, port)) as group:
            group.comm.broadcast()
            group.farewells.append(fails)

    leader, other = map(str, together(leads, follows))
    assert (leader, other) == ("rank 1: the GPU is gone", "the GPU is gone")


def test_c04_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RankError, match=f":{port}: the port is taken: give another MASTER_P"):
            meet(place(0, 2, port))
        server.close()
    with pytest.raises(RankError, match="MASTER_ADDR is no address of this host"):
        meet(place(0, 2, port, address="192.0.2.1"))
    with pytest.raises(RankError, match=f"no rank 0 at 127.0.0.1:{port} within 0.2 s: .*refused"):
        meet(place(1, 2, port, seconds=0.2))


def test_a_place_comes_from_the_environment():
    assert from_environment({"MASTER_ADDR": "a", "LOCAL_RANK": "0"}) is None
    found = from_environment(RIGHT | {"SLURM_JOB_ID": "17"})
    assert found == Place(1, 2, 1, "a", 9, job="17")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": ""}, "WORLD_SIZE is set, so RANK must be too"),
        ({"WORLD_SIZE": ""}, "RANK is set, so WORLD_SIZE must be too"),
        ({"LOCAL_RANK": ""}, "RANK is set, so LOCAL_RANK must be too"),
        ({"MASTER_ADDR": ""}, "RANK is set, so MASTER_ADDR must be too"),
        ({"MASTER_PORT": ""}, "RANK is set, so MASTER_PORT must be too"),
        ({"RANK": "2"}, "RANK must be 0 .. 1, not '2'"),
        ({"RANK": "-1"}, "RANK must be 0 .. 1, not '-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be 1 .. 1024, not 'two'"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK must be 0 .. 1, not '3'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be 1 .. 65535, not '65536'"),
        ({"RANK": "٠"}, "RANK must be 0 .. 1, not '٠'"),
        ({"DDTREE_NUMBA_PARENT": "x"}, "DDTREE_NUMBA_PARENT must be 1 .. 2147483647, not 'x'"),
        ({"DDTREE_NUMBA_LISTENER": "x"}, "DDTREE_NUMBA_LISTENER must be 0 .. 2147483647, not 'x'"),
        ({"DDTREE_NUMBA_NEWS": "99999"}, "DDTREE_NUMBA_NEWS 99999 is not what a parent opened"),
        ({"DDTREE_NUMBA_RANK_SECONDS": "0"}, "DDTREE_NUMBA_RANK_SECONDS must be a number above 0"),
    ],
)
def test_wrong_variables_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        from_environment(RIGHT | change)


@pytest.mark.parametrize(("text", "shared"), [(None, 0), ("", 0), ("0", 0), ("1", 1)])
def test_gpus_are_shared_where_the_environment_says_so(text, shared):
    environ = {} if text is None else {"DDTREE_NUMBA_SHARED_GPUS": text}
    assert gpus_are_shared(environ) == shared


def test_announcements_arrive_as_they_were(rng):
    tree = VerifyInput.of_chain(np.arange(3), 70, np.array([[4, -1]], np.int32))
    times = StepTimes(0.1, (1, 2), (0.3, 1 / 3))
    draws = [(SamplingParams(temperature=0.7, seed=2**64 - 1, stop=("é",)), 2**63)]
    sent = ("play", rng.standard_normal((0, 3)), tree, draws, Plan(True, 64, 16, times), {"a": 1})
    got = wire.decode(wire.encode(sent))
    assert got[0] == "play" and got[1].shape == (0, 3) and got[3] == (draws[0],)
    assert got[4:] == sent[4:]
    for name, array in vars(tree).items():
        other = getattr(got[2], name)
        assert other.dtype == array.dtype and np.array_equal(other, array)
    got[1].resize(3)  # an array of its own, to be written
    with pytest.raises(TypeError, match="^set cannot be sent"):
        wire.encode({1})
