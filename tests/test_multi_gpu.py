"""The bench over several GPUs, as far as it goes without them; processes that share one."""

import multiprocessing
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("numba.cuda")

from bench import gpu_processes, multi_gpu
from bench.gpu_processes import Group


def rank(group, messages, got):
    with suppress(EOFError):
        for message in messages:
            if isinstance(message, dict | Exception):
                group.connection.send(message)
            else:
                got.append(group.gather(message))


def served(*messages_of_ranks):
    """What `serve` returns, and what each rank got, for ranks that send these messages."""
    pipes = [multiprocessing.Pipe() for _ in messages_of_ranks]
    got = [[] for _ in messages_of_ranks]
    groups = [Group(number, len(pipes), theirs) for number, (_, theirs) in enumerate(pipes)]
    threads = [
        threading.Thread(target=rank, args=given)
        for given in zip(groups, messages_of_ranks, got, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        return gpu_processes.serve([mine for mine, _ in pipes]), got
    finally:
        for (mine, theirs), thread in zip(pipes, threads, strict=True):
            mine.close()
            thread.join()
            theirs.close()


def test_every_rank_gets_what_all_gave():
    results, got = served([b"a", b"b", dict(us=1)], [b"c", b"d", dict(us=2)])
    assert results == [dict(us=1), dict(us=2)]
    assert got == [[[b"a", b"c"], [b"b", b"d"]]] * 2


def test_the_rank_that_fails_is_named():
    with pytest.raises(RuntimeError, match="rank 1: no memory"):
        served([b"a", {}], [RuntimeError("no memory")])


def test_the_table_marks_the_fastest():
    lines = multi_gpu.table("us:", {"lines": {1: 2.61, 512: 48.2}, "pull": {1: 4.8, 512: 29.0}})
    assert lines == [
        "us:",
        "",
        "| T | 1 | 512 |",
        "|---|---:|---:|",
        "| lines | **2.6** | 48.2 |",
        "| pull | 4.8 | **29.0** |",
        "",
    ]


def test_one_gpu_is_too_few(monkeypatch, capsys):
    from bench import device

    runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    gpu = SimpleNamespace(cupy=SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(device, "Gpu", lambda: gpu)
    with pytest.raises(SystemExit):
        multi_gpu.main([])
    assert "1 ranks, and 1 GPUs are visible: at least two are needed" in capsys.readouterr().err


def test_sizes_that_do_not_fit_are_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(multi_gpu, "describe", lambda parser, wanted: (3, {}))
    for part in ("gpu_processes.run", "decoding.measure"):
        monkeypatch.setattr(f"bench.{part}", lambda *_: pytest.fail("something is measured"))
    with pytest.raises(SystemExit, match="--tp 8: no multiple of 3 GPUs"):
        multi_gpu.main([])


# --- processes, over CUDA IPC: a GPU each where there are several, else slices of time


def process(group: Group, where: str) -> None:
    try:
        import cupy

        from ddtree_numba.kernels.peers import Room
        from ddtree_numba.model.peer_memory import connect

        cupy.cuda.Device(group.rank % cupy.cuda.runtime.getDeviceCount()).use()
        room = Room.of(group.world, *3 * [17 * 7168 * 2])
        place = group.rank, group.world, room, group.gather
        memory, wrong = connect(*place, [where], blocks=16, early=False)
        group.gather(b"done")
        memory.close()
        group.connection.send(dict(wrong=wrong))
    except Exception as error:
        group.connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("world", [2, 3])
def test_gpu_the_self_test_passes_between_processes(world, where, request):
    if request.config.pluginmanager.hasplugin("bench.unpooled"):
        pytest.skip("several ranks under a sanitizer")
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=process, args=(Group(number, world, theirs), where), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for each in processes:
        each.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        assert gpu_processes.serve([mine for mine, _ in pipes]) == world * [dict(wrong=[])]
    finally:
        for each in processes:
            each.join(10)
            each.kill()
