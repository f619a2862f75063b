"""The measurement of loading, on the embedded model: its figures, not its verdict."""

import json

import pytest

from bench import loading
from bench.loading import main
from ddtree_numba.model.config import load_config
from ddtree_numba.model.plan import plan, total


def test_figures_of_a_rank(embedded, tmp_path, capsys):
    options = ["--tp", "8", "--rank", "3", "--cache", str(tmp_path / "packed")]
    main([str(embedded), *options, "--json", str(tmp_path / "figures.json")])
    steps = json.loads((tmp_path / "figures.json").read_text())["steps"]
    kept = total(plan(load_config(embedded), tp=8).target).rank_bytes
    assert list(steps) == ["checkpoint", "and write", "packed"]
    assert {step["kept"] for step in steps.values()} == {kept} == {steps["packed"]["read"]}
    assert steps["checkpoint"]["read"] > 2 * kept
    assert capsys.readouterr().out.count("\n") == 5


@pytest.mark.parametrize(
    "share, most, code, said",
    [(0, 1 << 60, 0, ""), (9e9, 1 << 60, 1, "of the disk's rate, not"), (0, 1, 1, "GiB of memory")],
)
def test_a_missed_goal_is_said(embedded, capsys, monkeypatch, share, most, code, said):
    monkeypatch.setattr(loading, "LEAST_SHARE", share)
    monkeypatch.setattr(loading, "MOST_BYTES", most)
    assert main([str(embedded)]) == code
    err = capsys.readouterr().err
    assert said in err and ("goal missed: " in err) is bool(code)


def test_a_checkpoint_that_cannot_be_used_is_a_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--cache", "file", "is no folder"),
        ("--cache", "file/x", "Not a directory"),
        ("--json", "none/x.json", "none is no folder"),
        ("--json", "file/x.json", "file is no folder"),
        ("--json", ".", "is a folder"),
        ("--cache", "shut", "cannot be written to"),
        ("--json", "shut/x.json", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_before_measuring(
    embedded, tmp_path, capsys, monkeypatch, option, value, message
):
    monkeypatch.setattr(loading, "measure", None)  # not reached
    (tmp_path / "file").touch()
    (tmp_path / "shut").mkdir()
    monkeypatch.setattr(loading.os, "access", lambda path, _: path.name != "shut")  # as for a user
    assert main([str(embedded), option, str(tmp_path / value)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {option} {tmp_path / value}: ") and err.count("\n") == 1
    assert message in err


def test_no_gpu_is_a_line(embedded, capsys, monkeypatch):
    def none(*_: object):
        raise ValueError("backend 'cuda': no device")

    monkeypatch.setattr("ddtree_numba.backends.open_backends", none)
    assert main([str(embedded), "--place", "cuda"]) == 1
    assert capsys.readouterr().err == "error: --place cuda: backend 'cuda': no device\n"


def test_no_row_for_weights_that_were_not_packed(embedded, tmp_path, capsys, monkeypatch):
    def full(*_: object):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddtree_numba.model.packed_file.Writer.add", full)
    main([str(embedded), "--cache", str(tmp_path)])
    out = capsys.readouterr().out
    assert "No space left on device" in out and "and write" in out and "\npacked" not in out
