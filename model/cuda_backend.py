"""The operations as kernels on the current GPU, in order on one stream."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ddtree_numba.kernels import (
    absorb,
    absorb_rope,
    cache_commit,
    draft_attention,
    embed,
    linear,
    linear_swiglu,
    moe_int4,
    moe_records,
    norm_rope_append,
    qk_norm_rope,
    rms_norm,
    rope,
    router,
    tree_attention,
)
from ddtree_numba.model.cache import PAGE
from ddtree_numba.model.cuda_arrays import Array, ranged
from ddtree_numba.model.cuda_rounds import CudaRounds
from ddtree_numba.spec.numerics import BF16, F32, Int4Matrix

NO_STEP = (None,) * 4


class CudaBackend(CudaRounds):
    """Every operation is its kernel."""

    name = "cuda"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(index)
        device = self.xp.cuda.Device()
        known = device.attributes
        self.multiprocessors = known["MultiProcessorCount"]
        self.shared_bytes = known["MaxSharedMemoryPerMultiprocessor"]
        self.positions_known = 0  # rows of the rope tables: the longest context and a tree
        self._planned: tuple = NO_STEP
        self._plan: Any = None

    def capture(self, call: Callable[[], object]) -> Any:
        """As a graph that makes its own plans, of which none is there before it is launched."""
        self._planned = NO_STEP
        try:
            return super().capture(call)
        finally:
            self._planned = NO_STEP

    def reserve(self, positions: int) -> None:
        """How far positions go: the length of the rope tables."""
        self.positions_known = positions

    # Operations of the models.

    def embed(self, token_ids, table, first_row: int = 0, dtype: np.dtype | None = None):
        out = self.empty((len(token_ids), table.shape[1]), dtype or table.dtype)
        return embed.embed(token_ids, table, first_row, out=out)

    def rms_norm(self, x, weight, eps: float, residual=None):
        y = self.empty(x.shape)
        if residual is None:
            return rms_norm.rms_norm(x, weight, eps, out=y)
        return rms_norm.rms_norm(x, weight, eps, residual, out=(y, self.empty(x.shape)))

    def qk_norm_rope(
        self,
        joint,
        q_norm,
        k_norm,
        eps: float,
        positions,
        inv_freq,
        queries: int,
        keys: int,
        amplitude=1.0,
        out=None,
    ):
        out = self.empty(joint.shape) if out is None else out
        table = self._rope_table(inv_freq, amplitude)
        given = (joint, q_norm, k_norm, eps, positions, table, queries, keys)
        return qk_norm_rope.qk_norm_rope(*given, out=out)

    def norm_rope_append(
        self,
        joint,
        q_norm,
        kv_norm,
        eps: float,
        positions,
        inv_freq,
        scratch,
        amplitude=1.0,
        shards=1,
    ):
        table, out = self._rope_table(inv_freq, amplitude), self.empty((len(joint), len(q_norm)))
        given = (joint, q_norm, kv_norm, eps, positions, table, scratch, shards)
        return norm_rope_append.norm_rope_append(*given, out=out)

    def linear(self, x, weight, out_dtype: np.dtype | None = None):
        out = self.empty((len(x), len(weight)), out_dtype or BF16)
        floats = linear.workspace_floats(len(x), *weight.shape)
        space = self.empty((floats,), F32) if floats else None
        return linear.linear(x, weight, workspace=space, out=out)

    def linear_swiglu(self, x, weight):
        space = self.empty(*linear_swiglu.workspace(len(x), *weight.shape))
        out = self.empty((len(x), len(weight) // 2))
        return linear_swiglu.linear_swiglu(x, weight, workspace=space, out=out)

    def absorb(self, x, weight):
        return absorb.absorb(x, weight, out=self.empty((*x.shape[:2], weight.shape[-1])))

    def absorb_rope(self, q, weight, positions, inv_freq, amplitude=1.0):
        table = self._rope_table(inv_freq, amplitude)
        out = self.empty((*q.shape[:2], weight.shape[-1] + table.shape[-1]))
        return absorb_rope.absorb_rope(q, weight, positions, table, out=out)

    def router(self, h, gate, bias, k: int, scaling: float, sizes=None):
        out = self.empty((len(h), k), np.int32), self.empty((len(h), k), F32)
        space = self.empty((router.workspace_words(len(h), h.shape[1], len(gate)),), np.int64)
        return router.router(h, gate, bias, k, scaling, sizes, workspace=space, out=out)

    def moe_int4(self, x, experts, weights, gate_up, down, base=None):
        rows, picks = experts.shape
        space = moe_int4.workspace(rows, picks, down, self._flat)
        given = (x, experts, weights, gate_up, down, base)
        out = self.empty(x.shape)
        moe_int4.moe_int4(*given, before_base=self.rejoin, workspace=space, out=out)
        self.rejoin()  # also where there was nothing to do
        return out

    def tree_attention(
        self, q, pages, scratch, page_table, starts, paths, sizes, scale: float, latent: int
    ):
        requests, nodes, heads, width = q.shape
        space = self._attention_plan(page_table, starts, paths, sizes, heads, width, latent)
        given = (q, pages, scratch, page_table, starts, paths, sizes, scale, latent)
        out = self.empty((requests, nodes, heads, latent))
        return tree_attention.tree_attention(*given, workspace=space, out=out)

    def draft_attention(
        self, q, k, v, pages, page_table, lengths, scale: float, causal=False, window=None
    ):
        words = draft_attention.workspace_words(q.shape, k.shape[2], page_table.shape[1])
        given = (q, k, v, pages, page_table, lengths, scale, causal, window)
        space = self.empty((words,), F32)
        return draft_attention.draft_attention(*given, workspace=space, out=self.empty(q.shape))

    def cache_commit(self, pages, scratch, page_table, starts, nodes, counts) -> None:
        cache_commit.cache_commit(pages, scratch, page_table, starts, nodes, counts)

    # Weights.

    def place(self, tensor: np.ndarray | Int4Matrix | moe_records.Records, field: str) -> Any:
        """A weight on the device: experts as records, all else as it is stored."""
        if isinstance(tensor, moe_records.Records):
            return replace(tensor, words=self.array(tensor.words))
        if not isinstance(tensor, Int4Matrix):
            return self.array(tensor)
        gated, experts = field.endswith("gate_up"), len(tensor.packed)
        with self.active():
            matrix = replace(
                tensor, packed=self.array(tensor.packed), scale=self.array(tensor.scale)
            )
            shape = moe_records.records_shape(experts, tensor.shape, gated)
            out, faults = self.empty(shape, np.uint32), self.full((experts,), 0)
            records = moe_records.pack(matrix, gated, faults=faults, out=out)
            moe_records.refuse(field, self.host(faults))
        return records

    def keep(self, tensor: np.ndarray | Int4Matrix, placed: Any) -> Any:
        """What a file of packed weights stores of a weight: `place` takes that, too."""
        if isinstance(placed, moe_records.Records):
            return replace(placed, words=self.host(placed.words))
        return tensor

    def _rope_table(self, inv_freq, amplitude: float) -> Array:
        return self.constant(rope.rope_table, self.positions_known, inv_freq, amplitude)

    def _flat(self, elements: int, dtype: Any) -> Array:
        return self.empty((elements,), dtype)

    def _attention_plan(
        self, page_table, starts, paths, sizes, heads: int, width: int, latent: int
    ):
        """Workspace with the plan of a step: made by the first of its layers."""
        step = (page_table, starts, paths, sizes)
        if all(map(operator.is_, step, self._planned)):
            return self._plan
        requests, nodes, depths = paths.shape
        positions = page_table.shape[1] * PAGE
        blocks = tree_attention.resident(
            nodes * -(-heads // 8), width, latent, self.multiprocessors, self.shared_bytes
        )
        arrays = tree_attention.workspace(requests, nodes, depths, heads, latent, positions, blocks)
        space = tree_attention.Workspace(**{k: self.empty(*v) for k, v in arrays.items()})
        tree_attention.plan_attention(
            *(starts, paths, sizes), heads=heads, positions=positions, workspace=space
        )
        self._planned, self._plan = step, space
        return space


for kind in (CudaRounds, CudaBackend):
    for method, operation in list(vars(kind).items()):
        if callable(operation) and not method.startswith("_"):
            setattr(kind, method, ranged(operation))
