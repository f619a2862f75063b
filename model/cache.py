"""The paged cache of one rank, and the pages that requests own."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.model.config import DrafterConfig, ModelConfig
from ddtree_numba.spec.tree_attention import CHUNK

PAGE = CHUNK  # positions in a page: attention reads a page a step


def pages_for(positions: int) -> int:
    """Pages that hold this many positions."""
    return -(-positions // PAGE)


class PageTable:
    """Which request owns which page: one row of page numbers a slot, -1 where none is owned."""

    def __init__(self, slots: int, pages: int, context: int) -> None:
        self.rows = np.full((slots, pages_for(context)), -1, np.int32)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def free_slots(self) -> np.ndarray:
        """Slots that own no page."""
        return np.flatnonzero((self.rows < 0).all(axis=1))

    def free_slot(self) -> int:
        """A slot that owns no page; ValueError when every slot is taken."""
        free = self.free_slots
        if not len(free):
            raise ValueError("every slot is taken: finish or close another answer first")
        return int(free[0])

    def reserve(self, slot: int, positions: int) -> bool:
        """Own pages for `positions` positions in all; False, and no change, if too few are free."""
        row = self.rows[slot]
        missing = np.flatnonzero(row[: pages_for(positions)] < 0)
        if len(missing) > len(self._free):
            return False
        for index in missing:
            row[index] = self._free.pop()
        return True

    def release(self, slot: int) -> None:
        """Give back every page of a slot."""
        row = self.rows[slot]
        self._free.extend(int(page) for page in row[row >= 0])
        row[:] = -1


class Cache:
    """Keys and values of one rank.

    | array       | shape                    | content                                             |
    |-------------|--------------------------|-----------------------------------------------------|
    | pages       | [layers, P, 64, W]       | committed rows: normed latent, rotated key; W = 576 |
    | scratch     | [layers, R N, W]         | the trees' own rows; only accepted ones are kept    |
    | draft_pages | [draft layers, P, 64, D] | the drafter's context: keys, then values, all heads |

    Both caches share page numbers, so a request has one row of the page table.
    """

    def __init__(
        self,
        config: ModelConfig,
        drafter: DrafterConfig | None,
        world: int,
        pages: int,
        rows: int,
        zeros: Callable[[tuple[int, ...]], Any],
    ) -> None:
        width = config.kv_lora_rank + config.qk_rope_head_dim
        layers = config.num_hidden_layers
        self.pages = zeros((layers, pages, PAGE, width))
        self.scratch = zeros((layers, rows, width))
        if drafter is not None:
            draft_width = 2 * drafter.num_key_value_heads // world * drafter.head_dim
            self.draft_pages = zeros((drafter.num_hidden_layers, pages, PAGE, draft_width))

    def rows(self, requests: int, nodes: int) -> Any:
        """The scratch of so many trees: [layers, requests, nodes, W]."""
        shape = (len(self.scratch), requests, nodes, -1)
        return self.scratch[:, : requests * nodes].reshape(shape)
