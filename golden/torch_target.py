"""The target in PyTorch: K2.6's architecture, experts always seen through their INT4 values."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUP = 32


def fake_quantize(weight: Tensor) -> Tensor:
    """bf16(q * scale) of every 32 columns, scale bf16(max|w| / 7.5); straight-through gradient."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7.5).bfloat16().float()
    values = (groups / scale).round().clamp(-8, 7)
    quantized = (values * scale).bfloat16().float().flatten(-2)
    return weight + (quantized - weight).detach()


def yarn_frequencies(dim: int, theta: float, scaling: dict) -> Tensor:
    """float32[dim / 2]: fast frequencies kept, slow ones divided by the factor, a ramp between."""
    exact = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def turns(count: float) -> float:
        period = scaling["original_max_position_embeddings"] / (count * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(theta))

    low = max(math.floor(turns(scaling["beta_fast"])), 0)
    high = min(math.ceil(turns(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (ramp * exact / scaling["factor"] + (1 - ramp) * exact).float()


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    return layer


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the correction bias decides who is picked, never how much one counts."""

    def __init__(self, shape: SimpleNamespace):
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(
            torch.randn(shape.n_routed_experts, shape.hidden_size) * shape.hidden_size**-0.5
        )
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.register_buffer("load", torch.zeros(shape.n_routed_experts), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """float32[..., E]: the weight of every expert, zero for those not picked."""
        with torch.autocast(h.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(h.bfloat16().float(), self.weight))
        picked = (
            (scores + self.e_score_correction_bias)
            .topk(self.shape.num_experts_per_tok, dim=-1)
            .indices
        )
        mask = torch.zeros_like(scores).scatter(-1, picked, 1.0)
        if self.training:
            self.load.copy_(mask.detach().flatten(0, -2).mean(0))
        weights = scores * mask
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.shape.routed_scaling_factor


class Moe(nn.Module):
    """All 12 experts see every token, as two plain matrix products; zero weights drop the rest."""

    def __init__(self, shape: SimpleNamespace):
        super().__init__()
        experts, hidden, inner = (
            shape.n_routed_experts,
            shape.hidden_size,
            shape.moe_intermediate_size,
        )
        self.gate = Router(shape)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) * 0.3 * inner**-0.5)
        self.shared_experts = Mlp(hidden, inner * shape.n_shared_experts)
        self.quantize = True

    def forward(self, h: Tensor) -> Tensor:
        gate_up, down = self.gate_up, self.down
        if self.quantize:
            gate_up, down = fake_quantize(gate_up), fake_quantize(down)
        weights = self.gate(h)
        inner = F.linear(h, gate_up.flatten(0, 1)).unflatten(-1, (weights.shape[-1], -1))
        g, u = inner.chunk(2, dim=-1)
        active = F.silu(g) * u * weights.unsqueeze(-1).to(g.dtype)
        return F.linear(active.flatten(-2), down.transpose(0, 1).flatten(1)) + self.shared_experts(
            h
        )


class Attention(nn.Module):
    """Multi-head latent attention; RoPE turns neighbouring pairs, YaRN is on at every length."""

    def __init__(self, shape: SimpleNamespace):
        super().__init__()
        self.shape = shape
        heads, nope, rope = (
            shape.num_attention_heads,
            shape.qk_nope_head_dim,
            shape.qk_rope_head_dim,
        )
        self.q_a_proj = linear(shape.hidden_size, shape.q_lora_rank)
        self.q_a_layernorm = Norm(shape.q_lora_rank, 1e-6)
        self.q_b_proj = linear(shape.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(shape.hidden_size, shape.kv_lora_rank + rope)
        self.kv_a_layernorm = Norm(shape.kv_lora_rank, 1e-6)
        self.kv_b_proj = linear(shape.kv_lora_rank, heads * (nope + shape.v_head_dim))
        self.o_proj = linear(heads * shape.v_head_dim, shape.hidden_size, 0.3)
        mscale = (
            0.1 * shape.rope_scaling["mscale_all_dim"] * math.log(shape.rope_scaling["factor"]) + 1
        )
        self.scale = (nope + rope) ** -0.5 * mscale**2

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_nope, q_rope [B,T,h,*]; normed latent [B,T,r]; rotated k_rope [B,T,rope]."""
        shape = self.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(h))).unflatten(
            -1, (shape.num_attention_heads, -1)
        )
        q_nope, q_rope = q.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(h).split(
            (shape.kv_lora_rank, shape.qk_rope_head_dim), dim=-1
        )
        q_rope = rotate_pairs(q_rope, cos.unsqueeze(-2), sin.unsqueeze(-2))
        return q_nope, q_rope, self.kv_a_layernorm(latent), rotate_pairs(k_rope, cos, sin)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Plain form: keys and values are expanded from the latent."""
        shape = self.shape
        q_nope, q_rope, latent, k_rope = self.project(h, cos, sin)
        kv = self.kv_b_proj(latent).unflatten(-1, (shape.num_attention_heads, -1))
        k_nope, v = kv.split((shape.qk_nope_head_dim, shape.v_head_dim), dim=-1)
        q = torch.cat((q_nope, q_rope.to(q_nope.dtype)), -1).transpose(1, 2)
        k_rope = k_rope.to(k_nope.dtype).unsqueeze(2).expand(*k_nope.shape[:-1], -1)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        v = F.pad(v, (0, shape.qk_rope_head_dim)).transpose(1, 2)  # one width for the fused kernel
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.o_proj(o[..., : shape.v_head_dim].transpose(1, 2).flatten(2))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class Layer(nn.Module):
    def __init__(self, shape: SimpleNamespace, index: int, dropout: float):
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        dense = index < shape.first_k_dense_replace
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size) if dense else Moe(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Target(nn.Module):
    def __init__(self, shape: SimpleNamespace, dropout: float = 0.0):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(
            Layer(shape, i, dropout) for i in range(shape.num_hidden_layers)
        )
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size, 0.5)
        frequencies = yarn_frequencies(shape.qk_rope_head_dim, shape.rope_theta, shape.rope_scaling)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.unsqueeze(-1).float() * self.inv_freq
        return angle.cos(), angle.sin()

    def forward(self, ids: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        """[B, T] -> un-normed states [B, T, H]; `taps` collects the residual after every layer."""
        cos, sin = self.angles(torch.arange(ids.shape[1], device=ids.device))
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
            if taps is not None:
                taps.append(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """float32[..., V]; a product in float32 keeps near ties apart."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(self.norm(x).bfloat16().float(), self.lm_head.weight.float())

    @torch.no_grad()
    def freeze_as_stored(self) -> "Target":
        """Every weight becomes what the files hold; only the router's bias stays float32."""
        for module in self.modules():
            if isinstance(module, Moe):
                module.gate_up.copy_(fake_quantize(module.gate_up))
                module.down.copy_(fake_quantize(module.down))
                module.quantize = False
        for parameter in self.parameters():
            parameter.copy_(parameter.bfloat16())
        return self.requires_grad_(False).eval()
