"""The token after each row: greedy, drawn, and drawn behind every filter."""

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.next_token import next_token, workspace_words
from ddtree_numba.kernels.row_settings import settings
from ddtree_numba.spec import next_token as spec

PARAMS = dict(
    greedy=dict(),
    race=dict(temperature=0.8),
    top_p=dict(temperature=0.8, top_p=0.95),
    top_k=dict(temperature=0.8, top_k=50),
    filters=dict(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02),
)
SIZES = {
    f"k26-{name}-rows{rows}": dict(rows=rows, vocabulary=163_840) | params
    for name, params in PARAMS.items()
    for rows in ((1, 17, 65) if name in ("greedy", "race") else (1, 17))
}


def on_device(given):
    rows = len(given["logits"])
    return dict(
        params=settings(given["params"], rows),
        workspace=np.zeros(workspace_words(rows, True), np.int64),
    )


@pytest.mark.parametrize("case", cases(spec, SIZES, smoke="partial_block"))
def bench_next_token(measure, case):
    measure(case, next_token, more=on_device)
