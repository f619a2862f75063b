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

    absorb = staticmethod(absorb)
    cache_commit = staticmethod(cache_commit)
    draft_attention = staticmethod(draft_attention)
    draft_topk = staticmethod(draft_topk)
    embed = staticmethod(embed)
    kv_append = staticmethod(kv_append)
    linear = staticmethod(linear)
    moe_int4 = staticmethod(moe_int4)
    next_token = staticmethod(next_token)
    rms_norm = staticmethod(rms_norm)
    rope = staticmethod(rope)
    router = staticmethod(router)
    swiglu = staticmethod(swiglu)
    tree_accept = staticmethod(tree_accept)
    tree_attention = staticmethod(tree_attention)
    tree_build = staticmethod(tree_build)

    def __init__(self, dtype: str = "bfloat16") -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        self.dtype = DTYPES[dtype]

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """A buffer of activations or cache rows, to be written before it is read."""
        return np.zeros(shape, self.dtype)

    def concatenate(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join along the last axis."""
        return np.concatenate(parts, axis=-1)
