"""Packed weights that cannot be written: no half file stays, and the load goes on."""

import errno
import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_numba.model import packed as packed_module
from ddtree_numba.model.config import load_config
from ddtree_numba.model.loader import load_target
from ddtree_numba.model.packed_file import Writer
from tests.kept import equal


def test_an_interrupted_load_leaves_no_file(tiny, kept) -> None:
    def interrupt(tensor: Any, field: str) -> None:
        if field == "lm_head":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.load(tiny, place=interrupt)
    assert kept.files == []


def test_what_a_killed_process_left_is_written_over(tiny, kept) -> None:
    kept.load(tiny)
    partial = kept.files[0].rename(kept.files[0].with_suffix(".packed.partial"))
    kept.load(tiny)
    assert kept.files == [partial.with_suffix("")]
    assert kept.load(tiny) and kept.calls(".safetensors") == 0


def test_two_processes_do_not_write_one_file(tiny, kept) -> None:
    kept.load(tiny)
    path = kept.files[0]
    path.unlink()
    with path.with_suffix(".packed.partial").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert kept.load(tiny)
        assert kept.notes == [f"{path}: not written: another process is writing it"]


def test_a_symbolic_link_is_not_written_through(tiny, kept, tmp_path) -> None:
    kept.load(tiny)
    path = kept.files[0]
    path.unlink()
    (tmp_path / "other").write_text("of somebody else")
    partial = path.with_suffix(".packed.partial")
    partial.symlink_to(tmp_path / "other")
    assert equal(kept.load(tiny), load_target(tiny, load_config(tiny)))
    assert kept.notes == [f"{path}: not written: {partial} is a symbolic link"]
    assert (tmp_path / "other").read_text() == "of somebody else" and kept.files == [partial]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_left_alone_and_named_in_a_line(tiny, kept, make) -> None:
    kept.load(tiny)
    path = kept.files[0]
    path.unlink()
    make(path)
    assert equal(kept.load(tiny), load_target(tiny, load_config(tiny)))
    assert kept.notes == [f"{path}: not written: what is there is no file"]
    assert kept.files == [path] and not path.is_file()


@pytest.mark.parametrize("step", ["add", "finish"])
def test_a_full_disk_spoils_nothing(tiny, kept, monkeypatch, step) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Writer, step, full)
    weights = kept.load(tiny)
    assert equal(weights, load_target(tiny, load_config(tiny)))
    (note,) = kept.notes
    assert note.endswith("not written: No space left on device") and kept.files == []


def test_no_room_and_no_folder_are_said(tiny, kept, tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(packed_module.shutil, "disk_usage", lambda _: usage)
    assert kept.load(tiny)
    assert "GB do not fit into 0.0" in kept.notes[0]
    (tmp_path / "file").touch()
    kept.packed = replace(kept.packed, folder=tmp_path / "file")
    assert kept.load(tiny)
    assert kept.notes == [f"packed weights are not kept: {tmp_path / 'file'}: File exists"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_named_once_for_all_files(
    tiny, kept, monkeypatch, code
) -> None:
    def refused(path: Path, *_: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(packed_module, "Writer", refused)
    assert equal(kept.load(tiny, 0, 2), load_target(tiny, load_config(tiny), 0, 2))
    reason = f"{kept.packed.folder}: {os.strerror(code)}"
    assert kept.notes == [f"packed weights are not kept: {reason}"]
    assert kept.load(tiny, 1, 2) and kept.notes == [] == kept.files


def test_a_folder_that_may_not_be_looked_into_costs_one_note(tiny, kept, monkeypatch) -> None:
    folder, stat = kept.packed.folder, os.stat

    def hidden(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", hidden)
    assert kept.load(tiny)
    assert kept.notes == [f"packed weights are not kept: {folder}: Permission denied"]
