"""The README's memory table of K2.6 on 8 cards is the planner's."""

from pathlib import Path

from ddtree_numba.model.config import load_config, load_drafter_config
from ddtree_numba.model.names import COLUMNS, target_pieces
from ddtree_numba.model.plan import plan, render
from tests.published import k26, k26_drafter
from tests.refusals import write

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_table_and_bytes_of_a_rank(tmp_path):
    (tmp_path / "drafter").mkdir()
    config = load_config(write(tmp_path, k26()))
    drafter = load_drafter_config(write(tmp_path / "drafter", k26_drafter()))
    lines = render(plan(config, drafter, tp=8)).splitlines()
    assert "\n".join(f"    {line}".rstrip() for line in lines) in README
    asked = kept = whole = 0
    for piece in target_pieces(config):
        all_ranks, one_rank = piece.local_bytes(1), piece.local_bytes(8)
        whole, kept = whole + all_ranks, kept + one_rank
        asked += all_ranks if piece.cut == COLUMNS else one_rank
    assert f"asks for {asked / 1e9:.0f} GB of the {whole / 1e9:.0f} and keeps {kept / 1e9:.0f}" in (
        " ".join(README.split())
    )
