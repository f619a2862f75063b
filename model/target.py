"""The Kimi K2.6 text model: absorbed multi-head latent attention, routed INT4 experts.

Formulas: the published DeepSeek-V3 modelling code, restated in the specifications that this file
calls. R requests of N rows each pass through a layer as T = R * N rows.
"""

import numpy as np

from ddtree_numba.model.backend import Backend
from ddtree_numba.model.cache import Cache
from ddtree_numba.model.comm import Comm
from ddtree_numba.model.config import ModelConfig
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.weights import DenseMlp, LayerWeights, MoeMlp, TargetWeights
from ddtree_numba.spec.numerics import F32
from ddtree_numba.spec.rope import yarn, yarn_amplitude


class Target:
    """One rank's share of the target."""

    def __init__(
        self, config: ModelConfig, weights: TargetWeights, ops: Backend, comm: Comm
    ) -> None:
        self.config, self.weights, self.ops, self.comm = config, weights, ops, comm
        self.inv_freq, self.scale = yarn(config)
        self.amplitude = yarn_amplitude(config.rope_scaling)
        self.heads = config.num_attention_heads // comm.world

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        """token ids [T] -> residual stream [T,H]; the table is sharded by vocabulary rows."""
        table = self.weights.embed
        first = self.comm.rank * table.shape[0]
        return self.comm.all_reduce(self.ops.embed(token_ids, table, first, dtype=self.ops.dtype))

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """Normed hidden states [T,H] -> logits of this rank's tokens, float32 [T,V/W]."""
        return self.ops.linear(hidden, self.weights.lm_head, out_dtype=F32)

    def forward(
        self,
        batch: VerifyInput,
        cache: Cache,
        tap_layers: tuple[int, ...] = (),
        used: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """-> (final normed hidden [T,H], taps [T, len(tap_layers) * H]); writes `cache.scratch`.

        A tap is the residual stream after a layer, before any norm. To used[layer] is added how
        many different experts the rows have chosen.
        """
        norm, eps = self.ops.rms_norm, self.config.rms_norm_eps
        layers = self.weights.layers
        next_norms = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        width = self.config.hidden_size
        taps = self.ops.empty((batch.tokens.size, len(tap_layers) * width))
        x = self.embed(batch.tokens.reshape(-1))  # [T,H]
        h = norm(x, layers[0].input_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attention = self.attention(layer, h, batch, cache, index)
            h, x = norm(x, layer.post_norm, eps, residual=attention)
            count = None if used is None else used[index : index + 1]
            h, x = norm(x, next_norm, eps, residual=self.mlp(layer.mlp, h, batch.sizes, count))
            if index in tap_layers:
                first = tap_layers.index(index) * width
                self.ops.copy(x, taps[:, first : first + width])
        return h, taps

    def attention(
        self, layer: LayerWeights, h: np.ndarray, batch: VerifyInput, cache: Cache, index: int
    ) -> np.ndarray:
        """Absorbed MLA: queries go to the latent space, so the cache is keys and values in one."""
        ops, c = self.ops, self.config
        requests, nodes = batch.tokens.shape
        positions = batch.positions.reshape(-1)

        joint = ops.linear(h, layer.qkv_a)  # [T, q_lora + latent + rope]
        if c.shards_latents:
            joint = self.comm.all_gather(joint)  # the ranks' parts side by side
        scratch = cache.rows(requests, nodes)[index]  # [R, N, latent + rope]
        q_a = ops.norm_rope_append(
            joint,
            layer.q_a_norm,
            layer.kv_a_norm,
            c.mla_norm_eps,
            positions,
            self.inv_freq,
            scratch.reshape(len(h), -1),
            amplitude=self.amplitude,
            shards=self.comm.world if c.shards_latents else 1,
        )

        q = ops.linear(q_a, layer.q_b)
        q = q.reshape(len(h), self.heads, -1)  # [T, heads, nope + rope]
        turning = positions, self.inv_freq, self.amplitude
        query = ops.absorb_rope(q, layer.w_uk, *turning)  # [T, heads, latent + rope]
        out = ops.tree_attention(
            query.reshape(requests, nodes, self.heads, -1),
            cache.pages[index],
            scratch,
            batch.page_table,
            batch.starts,
            batch.paths,
            batch.sizes,
            self.scale,
            c.kv_lora_rank,
        )
        value = ops.absorb(out.reshape(len(h), self.heads, -1), layer.w_uv)  # [T, heads, v]
        return self.comm.all_reduce(ops.linear(value.reshape(len(h), -1), layer.o))

    def mlp(
        self,
        mlp: DenseMlp | MoeMlp,
        h: np.ndarray,
        sizes: np.ndarray,
        used: np.ndarray | None = None,
    ) -> np.ndarray:
        """SwiGLU, dense or routed; routed and shared experts are summed before the ranks are."""
        ops = self.ops
        if isinstance(mlp, DenseMlp):
            return self.comm.all_reduce(self.swiglu_mlp(mlp, h))
        c = self.config
        shared = ops.beside(lambda: self.swiglu_mlp(mlp.shared, h))
        experts, weights = ops.router(
            h, mlp.gate, mlp.bias, c.num_experts_per_tok, c.routed_scaling_factor, sizes
        )
        if used is not None:
            chosen = ops.full((len(mlp.gate),), 0)
            chosen[experts.reshape(-1)] = 1
            used += chosen.sum()
        return self.comm.all_reduce(
            ops.moe_int4(h, experts, weights, mlp.gate_up, mlp.down, base=shared)
        )

    def swiglu_mlp(self, mlp: DenseMlp, h: np.ndarray) -> np.ndarray:
        """down(silu(gate h) * up h), this rank's partial sum."""
        return self.ops.linear(self.ops.linear_swiglu(h, mlp.gate_up), mlp.down)
