"""The operations that models are written against, as one backend offers them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ddtree_numba.model.comm import Comm
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.loader import place_numpy
from ddtree_numba.spec.absorb import absorb
from ddtree_numba.spec.absorb_rope import absorb_rope
from ddtree_numba.spec.cache_commit import cache_commit
from ddtree_numba.spec.draft_attention import draft_attention
from ddtree_numba.spec.draft_topk import draft_topk
from ddtree_numba.spec.embed import embed
from ddtree_numba.spec.linear import linear
from ddtree_numba.spec.linear_swiglu import linear_swiglu
from ddtree_numba.spec.moe_int4 import moe_int4
from ddtree_numba.spec.next_token import SamplingParams, next_token
from ddtree_numba.spec.norm_rope_append import norm_rope_append
from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.qk_norm_rope import qk_norm_rope
from ddtree_numba.spec.rms_norm import rms_norm
from ddtree_numba.spec.round_advance import round_advance
from ddtree_numba.spec.router import router
from ddtree_numba.spec.tree_accept import tree_accept
from ddtree_numba.spec.tree_attention import tree_attention
from ddtree_numba.spec.tree_build import Tree, tree_build
from ddtree_numba.spec.tree_size import tree_size

Backend = Any  # NumpyBackend, or CudaBackend, whose import needs Numba
DTYPES = {"bfloat16": BF16, "float32": F32}


class NumpyBackend:
    """Every operation is its specification. `dtype` is that of activations and cache.

    bfloat16 rounds where the kernels round; float32 runs the same formulas unrounded, to be
    compared with other implementations.
    """

    name = "numpy"
    xp = np

    def __init__(self, dtype: str = "bfloat16") -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        self.dtype = DTYPES[dtype]
        self.absorb = absorb
        self.absorb_rope = absorb_rope
        self.cache_commit = cache_commit
        self.draft_attention = draft_attention
        self.embed = embed
        self.linear = linear
        self.linear_swiglu = linear_swiglu
        self.moe_int4 = moe_int4
        self.norm_rope_append = norm_rope_append
        self.rms_norm = rms_norm
        self.round_advance = round_advance
        self.router = router
        self.tree_accept = tree_accept
        self.tree_attention = tree_attention
        self.tree_build = tree_build
        self.tree_prefix = Tree.prefix
        self.tree_size = tree_size
        self.verify_input = VerifyInput.of_tree

    def qk_norm_rope(self, *args: Any, out: np.ndarray | None = None, **options: Any) -> np.ndarray:
        turned = qk_norm_rope(*args, **options)
        if out is None:
            return turned
        out[...] = turned
        return out

    def candidates(self, part: np.ndarray, k: int, comm: Comm) -> tuple[np.ndarray, np.ndarray]:
        """The k likeliest tokens of each row [R,L,k], of logits that are cut over ranks."""
        return draft_topk(comm.all_gather(part), k)

    def next_tokens(
        self,
        part: np.ndarray,
        batch: VerifyInput,
        draws: Sequence[tuple[SamplingParams, int]],
        comm: Comm,
    ) -> np.ndarray:
        """The token after every node, int32 [R,N]: -1 in padding and for rows without a choice."""
        logits = comm.all_gather(part)
        tokens = np.full(batch.tokens.shape, -1, np.int32)
        for row, size in enumerate(batch.sizes):
            positions = batch.positions[row, :size].astype(np.int64) + 1  # of the drawn token
            params, seed = draws[row]
            seeds = np.full(size, seed, np.uint64)
            tokens[row, :size] = next_token(logits[row, :size], positions, seeds, params)
        return tokens

    def draws(
        self, params: Sequence[SamplingParams], seeds: Sequence[int], nodes: int
    ) -> list[tuple[SamplingParams, int]]:
        """What `next_tokens` takes, for trees of up to `nodes` nodes."""
        return list(zip(params, seeds, strict=True))

    def constant(self, function: Callable[..., np.ndarray], *arguments: Any) -> np.ndarray:
        """What a function of constants gives, where the operations read it."""
        return function(*arguments)

    def span(self, name: str) -> AbstractContextManager:
        """A range by that name in a profiler; numpy has none."""
        return nullcontext()

    def beside(self, call: Callable[[], np.ndarray]) -> np.ndarray:
        """A call's result; backends may make it beside what follows, until `moe_int4` takes it."""
        return call()

    def active(self) -> AbstractContextManager:
        """What holds while operations run: infinities reach the logits, to be reported there."""
        return np.errstate(over="ignore", invalid="ignore")

    def finish(self) -> None:
        """Wait until all operations are done."""

    def no_candidates(self, requests: int) -> tuple[np.ndarray, np.ndarray]:
        """The candidates of a round that drafts nothing."""
        shape = (requests, 0, 0)
        return np.empty(shape, np.int32), np.empty(shape, F32)

    def reserve(self, positions: int) -> None:
        """How far positions go; the specifications need no tables."""

    def placed_all(self) -> None:
        """Every weight is placed: what that needed is no longer needed."""

    # Arrays: where they live, and what is done with them beside the operations.

    def place(self, tensor: Any, field: str) -> Any:
        """A weight as the operations take it."""
        return place_numpy(tensor, field)

    def keep(self, tensor: Any, placed: Any) -> Any:
        """What a file of packed weights stores of a weight: `place` takes that, too."""
        return tensor

    def array(self, host: np.ndarray) -> np.ndarray:
        """A host array where the operations read it."""
        return host

    def host(self, array: np.ndarray) -> np.ndarray:
        """An array as numpy's."""
        return array

    def placed(self, batch: VerifyInput) -> VerifyInput:
        """A batch where the operations read it."""
        return batch

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        """Cache rows."""
        return np.zeros(shape, self.dtype)

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """A buffer of activations, to be written before it is read."""
        return np.empty(shape, self.dtype)

    def full(self, shape: tuple[int, ...], value: int) -> np.ndarray:
        """int32, the same everywhere."""
        return np.full(shape, value, np.int32)

    def positions(self, starts: np.ndarray, rows: int) -> np.ndarray:
        """starts[r] + 0 .. rows - 1 of every request, one after the other."""
        return (starts[:, None] + np.arange(rows, dtype=np.int32)).reshape(-1)

    def copy(self, source: np.ndarray, out: np.ndarray) -> None:
        """source into out, both of the backend's dtype; both may be views."""
        out[...] = source

    def path_rows(self, rows: np.ndarray, nodes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """rows[R,N,W] along each path -> [R,D,W]; beyond a path's end any row."""
        path = np.maximum(nodes[:, : counts.max()], 0)
        return rows[np.arange(len(rows))[:, None], path]
