"""Prompts pass through the same forward as trees, as chains of known tokens, in chunks."""

import threading
from collections.abc import Callable

import numpy as np

from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.rank import Ranks

CHUNK = 256  # prompt tokens a forward


def prefill(
    ranks: Ranks,
    ids: list[int],
    table: np.ndarray,
    with_taps: bool,
    cancel: threading.Event | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Commit all but the last prompt token, the first root; False if cancelled on the way.

    table: [1,M], the prompt's pages. progress(done, total) tells how many tokens of a prompt of
    several chunks are committed; each is waited for then.
    """
    total = len(ids) - 1
    for start in range(0, total, CHUNK):
        if cancel is not None and cancel.is_set():
            return False
        chunk = np.array(ids[start : min(start + CHUNK, total)], np.int32)
        batch = VerifyInput.of_chain(chunk, start, table)
        ranks.forward(batch, with_taps)
        path = np.arange(len(chunk), dtype=np.int32)[None]
        ranks.commit(batch.starts, path, batch.sizes, table)
        if progress is not None and total > CHUNK:
            ranks.finish()
            progress(start + len(chunk), total)
    return True
