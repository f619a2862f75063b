"""Threads beside their GPU."""

import os

from ddtree_numba.model.numa import bind, processors


def test_lists_of_processors():
    assert processors("0-3,8\n") == {0, 1, 2, 3, 8} and processors("\n") == set()


def test_a_thread_stays_where_its_device_is(tmp_path, monkeypatch):
    (tmp_path / "0000:4a:00.0").mkdir()
    place, kept = tmp_path / "0000:4a:00.0" / "local_cpulist", []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, allowed: kept.append(allowed))
    assert bind("0000:4A:00.0", tmp_path) == set()
    place.write_text("0-1\n")  # a container that may use none of them
    assert bind("0000:4A:00.0", tmp_path) == set() and not kept
    place.write_text("0-2,4\n")
    assert bind("0000:4A:00.0", tmp_path) == {2, 4} and kept == [{2, 4}]
