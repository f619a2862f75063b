"""Embedding rows of one rank's shard of the vocabulary."""

import pytest

from bench.cases import cases
from ddtree_numba.kernels.embed import embed
from ddtree_numba.spec import embed as spec


def held_tokens(given, rng):
    """Other rows of the one table, all of them on this rank: as many bytes as `cost` counts."""
    held = given["first_row"] + rng.integers(0, len(given["table"]), len(given["token_ids"]))
    return given | dict(token_ids=held.astype("int32"))


@pytest.mark.parametrize("case", cases(spec, rows=(1, 17, 4096), smoke="second_shard"))
def bench_embed(measure, case):
    measure(case, embed, vary=held_tokens)
