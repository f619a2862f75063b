"""The likeliest tokens of each draft position: one request and many, one rank's shard."""

import numpy as np
import pytest

from bench.cases import cases
from ddtree_numba.kernels.draft_topk import draft_topk, workspace_words
from ddtree_numba.spec import draft_topk as spec

PLAIN = dict(depths=7, vocabulary=163_840)
SIZES = {
    "k26-k16": PLAIN | dict(requests=1, k=16),
    "k26-k32": PLAIN | dict(requests=1, k=32),
    "k26-k64": PLAIN | dict(requests=1, k=64),
    "k26-4-requests": PLAIN | dict(requests=4, k=32),
    "k26-16-requests": PLAIN | dict(requests=16, k=32),
    "k26-shard": dict(requests=1, depths=7, vocabulary=20_480, k=32),
}


def space(given):
    *leading, vocabulary = given["logits"].shape
    words = workspace_words(int(np.prod(leading)), vocabulary)
    return dict(workspace=np.zeros(words, np.int64))


@pytest.mark.parametrize("case", cases(spec, SIZES, smoke="k_above_the_vocabulary"))
def bench_draft_topk(measure, case):
    measure(case, draft_topk, more=space)
