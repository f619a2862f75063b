"""The bench of several full-size ranks, as far as it goes without GPUs."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from bench import step_ranks
from bench.step_rank import repeated
from ddtree_numba.spec.numerics import BF16


def row(sums, tokens, verify, whole):
    return dict(sums=sums, tokens=tokens, context=8192, seconds=dict(verify=verify, round=whole))


def test_the_table_sets_rounds_beside_rounds_without_sums():
    rows = [row("with", 1, 4e-3, 4e-3), row("with", 9, 8e-3, 10e-3)]
    rows += [row("without", 1, 3e-3, 3e-3), row("without", 9, 7e-3, 9e-3)]
    assert step_ranks.table(dict(ranks=[dict(rows=rows)]))[2:] == [
        "| 1 | 8,192 | 4.000 | 3.000 | 4.000 | 3.000 | 250 |",
        "| 9 | 8,192 | 8.000 | 7.000 | 10.000 | 9.000 | 310 to 486 |",
    ]


def test_parts_of_ranks_that_are_not_there_are_repeated():
    part = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert repeated(part, 1) is part
    assert repeated(part, 4).tobytes() == np.tile(part, 4).tobytes()
    assert repeated(part.astype(BF16), 2).tobytes() == np.tile(part, 2).astype(BF16).tobytes()


def test_gpus_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(SystemExit, match="--tp 8: no multiple of 3 GPUs"):
        step_ranks.asked(3, "--tp 8")


def test_a_failure_is_named():
    rows = [row("with", 1, 4e-3, 4e-3) | dict(failure=None)]
    late = rows[0] | dict(failure="rank 1 did not come")
    result = dict(ranks=[dict(rows=rows), dict(rows=[late])])
    assert step_ranks.failures(result) == ["rank 1 did not come"]
    about = dict(world=2, tp=8, layers=None, config="Kimi K2.6", shards_latents=True)
    assert step_ranks.title(about) == "2 of 8 ranks of Kimi K2.6, latents cut:"
