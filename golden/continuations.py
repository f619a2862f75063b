"""The target's own continuations of training text: what the drafter learns to foresee.

Thousands of sequences decode at once over a latent cache, each at its own length, in MLA's
absorbed form.
"""

from typing import NamedTuple

import torch
from dataset import rows
from shapes import BASE, EOS_IDS
from torch import Tensor
from torch_target import Attention, Target

SHORT, LONG = 256, 1024  # longest prompts of the two kinds of batches
CHAT_SHARE = 0.2  # of a short batch
PREFILL_ROWS = 256
END_OF_THOUGHT = BASE + 23


class Sequences(NamedTuple):
    """ids [B, S] right-padded; row b has its prompt in 0..prompts[b]-1 and ends at lengths[b]."""

    ids: Tensor
    prompts: Tensor
    lengths: Tensor


@torch.no_grad()
def extend(
    model: Target,
    ids: Tensor,
    lengths: Tensor,
    new_tokens: int,
    temperature: Tensor,
    greedy_after: Tensor,
) -> Sequences:
    """Decode `new_tokens` after each row's first lengths[b] ids, or up to a stop token.

    Row b samples at temperature[b] until it has greedy_after[b] new tokens and takes the best
    token from then on.
    """
    device, batch, width = ids.device, len(ids), ids.shape[1]
    every = torch.arange(batch, device=device)
    out = torch.zeros(batch, width + new_tokens, dtype=torch.long, device=device)
    out[:, :width] = ids
    shape = model.shape
    entry = shape.kv_lora_rank + shape.qk_rope_head_dim
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32
    cache = torch.zeros(
        len(model.layers), batch, width + new_tokens, entry, dtype=dtype, device=device
    )
    for start in range(0, batch, PREFILL_ROWS):
        _prefill(model, ids[start : start + PREFILL_ROWS], cache[:, start : start + PREFILL_ROWS])
    stops = torch.tensor(EOS_IDS, device=device)
    now, alive = lengths.clone(), torch.ones(batch, dtype=torch.bool, device=device)
    for step in range(new_tokens):
        logits = _step(model, out[every, now - 1], now - 1, cache)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-10, 1 - 1e-7)))
        warm = torch.where(greedy_after > step, temperature, torch.zeros_like(temperature))
        token = (logits + warm.unsqueeze(-1) * noise).argmax(-1)
        out[every, now] = torch.where(alive, token, out[every, now])
        now += alive
        alive &= ~torch.isin(token, stops)
    return Sequences(out, lengths, now)


def _prefill(model: Target, ids: Tensor, cache: Tensor) -> None:
    cos, sin = model.angles(torch.arange(ids.shape[1], device=ids.device))
    x = model.embed_tokens(ids)
    for layer, entries in zip(model.layers, cache, strict=True):
        _, _, latent, k_rope = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        entries[:, : ids.shape[1]] = torch.cat((latent, k_rope), -1)
        x = layer(x, cos, sin)


def _step(model: Target, tokens: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    """float32[B, V]: the logits after `tokens` at `positions`; their entries join the cache."""
    every = torch.arange(len(tokens), device=tokens.device)
    cos, sin = model.angles(positions)
    hidden = torch.arange(cache.shape[2], device=tokens.device) > positions.unsqueeze(-1)
    x = model.embed_tokens(tokens)
    for layer, entries in zip(model.layers, cache, strict=True):
        q_nope, q_rope, latent, k_rope = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        entries[every, positions] = torch.cat((latent, k_rope), -1).to(entries.dtype)
        x = x + layer.self_attn.o_proj(_absorbed(layer.self_attn, q_nope, q_rope, entries, hidden))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.logits(x)


def _absorbed(
    attention: Attention, q_nope: Tensor, q_rope: Tensor, entries: Tensor, hidden: Tensor
) -> Tensor:
    """[B, h * v]: queries move into the latent space instead of keys out of it."""
    shape = attention.shape
    up = attention.kv_b_proj.weight.view(shape.num_attention_heads, -1, shape.kv_lora_rank)
    w_uk, w_uv = up.split((shape.qk_nope_head_dim, shape.v_head_dim), dim=1)
    dtype = entries.dtype
    query = torch.cat(
        (torch.einsum("bhd,hdr->bhr", q_nope.to(dtype), w_uk.to(dtype)), q_rope.to(dtype)), -1
    )
    scores = (query @ entries.mT).float() * attention.scale
    weights = scores.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1).to(dtype)
    o_latent = weights @ entries[..., : shape.kv_lora_rank]
    return torch.einsum("bhr,hvr->bhv", o_latent, w_uv.to(dtype)).flatten(1)


def prompts(data: dict[str, Tensor], longest: int, batch: int) -> tuple[Tensor, Tensor]:
    """Random pieces of files; a short batch also holds conversations, cut at or in the answer."""
    files, chats = data["train"], data["train_chat"]
    device = files.device
    ids = rows(files, torch.randint(len(files), (batch,), device=device), longest)
    shortest = SHORT if longest > SHORT else 1
    drawn = torch.rand(batch, device=device) ** 1.5
    lengths = shortest + (drawn * (longest - shortest + 1)).long().clamp_max(longest - shortest)
    if longest > SHORT:
        return ids, lengths
    count, starts = round(batch * CHAT_SHARE), data["train_chat_starts"]
    chosen = starts[torch.randint(len(starts), (count,), device=device)]
    ids[:count] = rows(chats, chosen, longest)
    thought = ids[:count] == END_OF_THOUGHT
    opening = thought.int().argmax(1) + 1
    inside = (torch.rand(count, device=device) < 0.3) | ~thought.any(1)
    lengths[:count] = torch.where(inside, lengths[:count], opening)
    return ids, lengths


@torch.no_grad()
def make(
    model: Target, data: dict[str, Tensor], longest: int, batch: int, new_tokens: int, device: str
) -> tuple[Sequences, Tensor]:
    """Sequences and the features bf16[B, S, K * H] of all their positions.

    Half of the rows are greedy; a third samples for a while and then goes on greedily, since text
    that the model strayed into is closer to what it meets later than text it was trained on; the
    rest samples to the end.
    """
    ids, lengths = prompts(data, longest, batch)
    kind = torch.rand(batch, device=device)
    temperature = torch.where(kind < 0.85, 1.0, 0.8)
    sampled = torch.randint(8, 65, (batch,), device=device)
    greedy_after = torch.where(kind < 0.5, 0, torch.where(kind < 0.85, sampled, new_tokens))
    with torch.autocast(device, torch.bfloat16):
        made = extend(model, ids, lengths, new_tokens, temperature, greedy_after)
        features = torch.cat([_features(model, part) for part in made.ids.split(PREFILL_ROWS)])
    return made, features


def _features(model: Target, ids: Tensor) -> Tensor:
    taps: list[Tensor] = []
    model(ids, taps)
    return torch.cat([tap.bfloat16() for tap in taps], -1)
