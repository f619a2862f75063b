"""The DFlash drafter in PyTorch: every anchor of a sequence drafts its own block in one pass."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_target import Mlp, Norm, linear, yarn_frequencies


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, d], angles [B, T, d / 2]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class DraftAttention(nn.Module):
    def __init__(self, shape: SimpleNamespace):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = linear(shape.hidden_size, self.heads * self.dim)
        self.k_proj = linear(shape.hidden_size, self.kv_heads * self.dim)
        self.v_proj = linear(shape.hidden_size, self.kv_heads * self.dim)
        self.o_proj = linear(self.heads * self.dim, shape.hidden_size, 0.3)
        self.q_norm = Norm(self.dim, shape.rms_norm_eps)
        self.k_norm = Norm(self.dim, shape.rms_norm_eps)

    def forward(
        self, h: Tensor, context: Tensor, at: tuple, at_context: tuple, mask: Tensor
    ) -> Tensor:
        """h [B, Q, H] block rows, context [B, S, H]; mask [B, Q, S + Q], true = visible."""
        rows = torch.cat((context, h.to(context.dtype)), 1)
        q = self.q_norm(self.q_proj(h).unflatten(-1, (self.heads, self.dim)))
        k = self.k_norm(self.k_proj(rows).unflatten(-1, (self.kv_heads, self.dim)))
        v = self.v_proj(rows).unflatten(-1, (self.kv_heads, self.dim))
        cos, sin = (torch.cat(pair, 1) for pair in zip(at_context, at, strict=True))
        q, k = rotate_halves(q, *at).to(v.dtype), rotate_halves(k, cos, sin).to(v.dtype)
        repeats = self.heads // self.kv_heads
        k, v = (x.repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask.unsqueeze(1))
        return self.o_proj(o.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    def __init__(self, shape: SimpleNamespace):
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DraftAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(
        self, x: Tensor, context: Tensor, at: tuple, at_context: tuple, mask: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, at, at_context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, shape: SimpleNamespace):
        super().__init__()
        self.shape = shape
        self.fc = linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        scaling = shape.rope_parameters
        frequencies = yarn_frequencies(shape.head_dim, scaling["rope_theta"], scaling)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.unsqueeze(-1).float() * self.inv_freq
        return angle.cos(), angle.sin()

    def forward(self, ids: Tensor, taps: Tensor, anchors: Tensor, embed: Tensor) -> Tensor:
        """States [B, A, L, H] that score the tokens at anchor + 1 .. anchor + L.

        ids [B, S], taps [B, S, K * H], anchors [B, A]: the block of anchor a holds its token and
        masks at positions a .. a + L, sees the context rows before a and all of itself.
        """
        size = self.shape.block_size
        batch, width = ids.shape
        blocks = anchors.unsqueeze(-1) + torch.arange(
            size, device=ids.device
        )  # [B, A, size] positions
        tokens = torch.full_like(blocks, self.shape.mask_token_id)
        tokens[..., 0] = ids.gather(1, anchors)
        positions = blocks.flatten(1)
        context = self.hidden_norm(self.fc(taps))
        of_context = torch.arange(width, device=ids.device)
        at_context = tuple(x.expand(batch, -1, -1) for x in self.angles(of_context))
        owner = torch.arange(anchors.shape[1], device=ids.device).repeat_interleave(size)
        before = of_context < anchors.repeat_interleave(size, dim=1).unsqueeze(-1)
        inside = (owner.unsqueeze(-1) == owner).expand(batch, -1, -1)
        mask = torch.cat((before, inside), -1)
        x = F.embedding(tokens.flatten(1), embed)
        for layer in self.layers:
            x = layer(x, context, self.angles(positions), at_context, mask)
        return self.norm(x).unflatten(1, (-1, size))[:, :, 1:]
