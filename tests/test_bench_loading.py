"""The measurement of loading, on the embedded model: its figures, not its verdict."""

import json

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


def test_a_checkpoint_that_cannot_be_used_is_a_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
