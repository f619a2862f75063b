"""The drafter's block over its context: a rank's share at TP 8, one request and four."""

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.draft_attention import draft_attention, workspace_words
from ddtree_numba.spec import draft_attention as spec

K26 = spec.CASES["k26"]
SIZES = {
    f"k26-R{requests}-{context}": K26 | dict(lengths=[context] * requests)
    for requests in (1, 4)
    for context in (1024, 8192, 32768, 131072)
}
SIZES["k26-R1-131072-window-4096"] = K26 | dict(lengths=[131072], window=4096)


def workspace(given):
    q, k, table = given["q"], given["k"], given["page_table"]
    return dict(workspace=np.zeros(workspace_words(q.shape, k.shape[2], table.shape[1]), "f4"))


@pytest.mark.parametrize("case", cases(spec, SIZES, smoke="tiny_rank"))
def bench_draft_attention(measure, case):
    measure(case, draft_attention, more=workspace)
