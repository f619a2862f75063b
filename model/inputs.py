"""What one verify forward takes: the contract between the engine and the attention operation."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddtree_numba.spec.tree_build import Tree
from ddtree_numba.spec.tree_links import tree_links
from ddtree_numba.spec.tree_mask import tree_mask, tree_paths


@dataclass(frozen=True)
class VerifyInput:
    """A tree for each of R requests, N nodes wide, and where its context lies.

    | field      | shape    | dtype | meaning                                                     |
    |------------|----------|-------|-------------------------------------------------------------|
    | tokens     | [R,N]    | int32 | token of each node, node 0 the root; 0 in padding           |
    | positions  | [R,N]    | int32 | start + depth; siblings share one                           |
    | parents    | [R,N]    | int32 | parent < child; -1 for the root and in padding              |
    | paths      | [R,N,D]  | int32 | nodes from the root down to the node itself, -1 beyond      |
    | sizes      | [R]      | int32 | how many nodes are real                                     |
    | starts     | [R]      | int32 | committed positions, so the root stands at `start`          |
    | page_table | [R,M]    | int32 | page of positions 64 m .. 64 m + 63, -1 where none is owned |
    """

    tokens: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    paths: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    page_table: np.ndarray

    @cached_property
    def words(self) -> np.ndarray:
        """uint64[R,N,ceil(N/64)]: bit j of row i says that j is i or an ancestor of i."""
        return tree_mask(self.parents, self.sizes)

    @cached_property
    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """(first_child, next_sibling), int32[R,N] each."""
        return tree_links(self.parents, self.sizes)

    @classmethod
    def of_tree(cls, tree: Tree, starts: np.ndarray, page_table: np.ndarray) -> "VerifyInput":
        """The input that verifies a drafted tree."""
        real = np.arange(tree.tokens.shape[1]) < tree.sizes[:, None]
        return cls(
            tokens=np.where(real, tree.tokens, 0).astype(np.int32),
            positions=(starts[:, None] + np.where(real, tree.depths, 0)).astype(np.int32),
            parents=tree.parents,
            paths=tree_paths(tree.parents, tree.depths, tree.sizes),
            sizes=tree.sizes,
            starts=starts.astype(np.int32),
            page_table=page_table,
        )

    @classmethod
    def of_chain(cls, token_ids: np.ndarray, start: int, page_table: np.ndarray) -> "VerifyInput":
        """A run of known tokens of one request (prefill): a tree without branches."""
        n = len(token_ids)
        index = np.arange(n, dtype=np.int32)
        return cls(
            tokens=np.asarray(token_ids, np.int32)[None],
            positions=(start + index)[None],
            parents=(index - 1)[None],
            paths=np.where(index <= index[:, None], index, np.int32(-1))[None],
            sizes=np.array([n], np.int32),
            starts=np.array([start], np.int32),
            page_table=page_table,
        )
