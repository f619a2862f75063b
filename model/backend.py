"""The operations that models are written against, as one backend offers them."""

import numpy as np

from ddtree_numba.spec.absorb import absorb
from ddtree_numba.spec.cache_commit import cache_commit
from ddtree_numba.spec.draft_attention import draft_attention
from ddtree_numba.spec.draft_topk import draft_topk
from ddtree_numba.spec.embed import embed
from ddtree_numba.spec.kv_append import kv_append
from ddtree_numba.spec.linear import linear
from ddtree_numba.spec.moe_int4 import moe_int4
from ddtree_numba.spec.next_token import next_token
from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.rms_norm import rms_norm
from ddtree_numba.spec.rope import rope
from ddtree_numba.spec.router import router
from ddtree_numba.spec.swiglu import swiglu
from ddtree_numba.spec.tree_accept import tree_accept
from ddtree_numba.spec.tree_attention import tree_attention
from ddtree_numba.spec.tree_build import tree_build

DTYPES = {"bfloat16": BF16, "float32": F32}


class NumpyBackend:
    """Every operation is its specification. `dtype` is that of activations and cache.

    bfloat16 rounds where the kernels round; float32 runs the same formulas unrounded, to be
    compared with other implementations.
    """

    name = "numpy"

    def __init__(self, dtype: str = "bfloat16") -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        self.dtype = DTYPES[dtype]
        self.absorb = absorb
        self.cache_commit = cache_commit
        self.draft_attention = draft_attention
        self.draft_topk = draft_topk
        self.embed = embed
        self.kv_append = kv_append
        self.linear = linear
        self.moe_int4 = moe_int4
        self.next_token = next_token
        self.rms_norm = rms_norm
        self.rope = rope
        self.router = router
        self.swiglu = swiglu
        self.tree_accept = tree_accept
        self.tree_attention = tree_attention
        self.tree_build = tree_build

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """A buffer of activations or cache rows, to be written before it is read."""
        return np.zeros(shape, self.dtype)

    def concatenate(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join along the last axis."""
        return np.concatenate(parts, axis=-1)
