"""The DFlash drafter: one pass proposes a distribution for each of the next positions.

Source: z-lab/dflash, `dflash/model.py`. It owns neither embedding nor head but uses the target's.
"""

import numpy as np

from ddtree_numba.model.backend import Backend
from ddtree_numba.model.cache import Cache
from ddtree_numba.model.comm import Comm
from ddtree_numba.model.config import DrafterConfig
from ddtree_numba.model.weights import DenseMlp, DrafterWeights, DraftLayerWeights
from ddtree_numba.spec.rope import yarn_frequencies


class Drafter:
    """One rank's share of the drafter."""

    def __init__(
        self, config: DrafterConfig, weights: DrafterWeights, ops: Backend, comm: Comm
    ) -> None:
        self.config, self.weights, self.ops, self.comm = config, weights, ops, comm
        self.inv_freq = yarn_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.heads = config.num_attention_heads // comm.world
        self.kv_heads = config.num_key_value_heads // comm.world
        self.query_width = self.heads * config.head_dim

    def append(
        self,
        taps: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        page_table: np.ndarray,
        cache: Cache,
    ) -> None:
        """Write the context of committed rows: taps [R,C,K*H], row j < counts at starts + j.

        Context rows pass through no attention and no MLP: one projection serves every layer's keys.
        """
        ops = self.ops
        requests, rows = taps.shape[:2]
        positions = ops.positions(starts, rows)
        part = ops.linear(taps.reshape(requests * rows, -1), self.weights.fc)
        context = self.comm.all_gather(part)  # [T,H]
        context = ops.rms_norm(context, self.weights.hidden_norm, self.config.rms_norm_eps)
        shape = (requests * rows, 2 * self.kv_heads, self.config.head_dim)
        written = ops.empty((len(self.weights.layers), *shape))
        for layer, out in zip(self.weights.layers, written, strict=True):
            key_value = ops.linear(context, layer.qkv[self.query_width :]).reshape(shape)
            self._rotated(key_value, layer, positions, queries=0, out=out)
        written = written.reshape(len(written), requests, rows, -1)
        order = ops.positions(starts * 0, rows).reshape(requests, rows)
        ops.cache_commit(cache.draft_pages, written, page_table, starts, order, counts)

    def forward(
        self, block: np.ndarray, starts: np.ndarray, page_table: np.ndarray, cache: Cache
    ) -> np.ndarray:
        """Embedded block [R,B,H], row i at position starts + i -> normed hidden [R,B-1,H].

        Row i predicts the token at its own position; row 0 holds the root, which is known.
        """
        ops, c = self.ops, self.config
        requests, rows, width = block.shape
        positions = ops.positions(starts, rows)
        layers = self.weights.layers
        next_norms = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        x = block.reshape(-1, width)
        h = ops.rms_norm(x, layers[0].input_norm, c.rms_norm_eps)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attention = self.attention(layer, index, h, positions, starts, page_table, cache)
            h, x = ops.rms_norm(x, layer.post_norm, c.rms_norm_eps, residual=attention)
            h, x = ops.rms_norm(x, next_norm, c.rms_norm_eps, residual=self.mlp(layer.mlp, h))
        return h.reshape(requests, rows, width)[:, 1:]

    def attention(
        self,
        layer: DraftLayerWeights,
        index: int,
        h: np.ndarray,
        positions: np.ndarray,
        starts: np.ndarray,
        page_table: np.ndarray,
        cache: Cache,
    ) -> np.ndarray:
        """Block rows see the committed context and the block, as the layer's type says."""
        ops, c = self.ops, self.config
        heads, both = self.heads, self.heads + self.kv_heads
        joint = ops.linear(h, layer.qkv).reshape(len(h), both + self.kv_heads, c.head_dim)
        joint = self._rotated(joint, layer, positions, queries=heads)
        joint = joint.reshape(len(starts), -1, *joint.shape[1:])
        causal, window = c.visibility(index)
        pages = cache.draft_pages[index]
        out = ops.draft_attention(
            joint[:, :, :heads],
            joint[:, :, heads:both],
            joint[:, :, both:],
            pages.reshape(*pages.shape[:2], 2, self.kv_heads, c.head_dim),
            page_table,
            starts,
            c.head_dim**-0.5,
            causal=causal,
            window=window,
        )
        return self.comm.all_reduce(ops.linear(out.reshape(len(h), -1), layer.o))

    def mlp(self, mlp: DenseMlp, h: np.ndarray) -> np.ndarray:
        """SwiGLU, summed over the ranks."""
        part = self.ops.linear(self.ops.linear_swiglu(h, mlp.gate_up), mlp.down)
        return self.comm.all_reduce(part)

    def _rotated(
        self,
        joint: np.ndarray,
        layer: DraftLayerWeights,
        positions: np.ndarray,
        queries: int,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Queries, keys and values [T, heads, d]; all but the values normed, then rotated."""
        c = self.config
        return self.ops.qk_norm_rope(
            joint,
            layer.q_norm,
            layer.k_norm,
            c.rms_norm_eps,
            positions,
            self.inv_freq,
            queries,
            self.kv_heads,
            amplitude=c.rope_attention_factor,
            out=out,
        )
