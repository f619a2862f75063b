"""What a step must at least take: bytes over the copy rate, or operations over the mma rate.

The larger of the two for each part, the parts one after the other. Weights are read once, of the
experts those that are asked for; activations stay in L2; nothing is spent between kernels, and
nothing on the wire. Attention is padded to the mma's 16 rows, an expert's rows to its 8 columns.
"""

from math import ceil

from ddtree_numba.model.config import DrafterConfig, ModelConfig
from ddtree_numba.spec.numerics import GROUP

BF16, INT4 = 2, 0.5 + 2 / GROUP  # bytes of a weight

Rates = tuple[float, float]  # bytes and operations a second


def roof(rates: Rates, size: float, operations: float) -> float:
    return max(size / rates[0], operations / rates[1])


def through(rates: Rates, weights: float, rows: int) -> float:
    """Rows through bfloat16 weights."""
    return roof(rates, BF16 * weights, 2 * weights * rows)


def verify(
    config: ModelConfig, tp: int, rows: int, context: int, distinct: float, rates: Rates
) -> dict[str, float]:
    """Seconds of each part of a forward over the tree of one request, on one of tp ranks."""
    c, layers = config, config.num_hidden_layers
    heads, latent = c.num_attention_heads / tp, c.kv_lora_rank + c.qk_rope_head_dim
    query = c.qk_nope_head_dim + c.qk_rope_head_dim
    projections = c.hidden_size * (c.q_lora_rank + latent) + c.q_lora_rank * heads * query
    projections += c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    projections += heads * c.v_head_dim * c.hidden_size
    mla = 16 * ceil(heads * rows / 16) * (context + rows) * 2 * (latent + c.kv_lora_rank)
    moe = layers - c.first_k_dense_replace
    expert = 3 * c.hidden_size * c.moe_intermediate_size / tp
    beside = c.hidden_size * c.n_routed_experts + c.n_shared_experts * expert
    each = 8 * ceil(rows * c.num_experts_per_tok / distinct / 8)
    dense = c.first_k_dense_replace * 3 * c.hidden_size * c.intermediate_size / tp
    return dict(
        projections=layers * through(rates, projections, rows),
        attention=layers * roof(rates, context * latent * BF16, mla),
        router_shared=moe * through(rates, beside, rows),
        experts=moe * roof(rates, distinct * expert * INT4, 2 * expert * distinct * each),
        dense_head=through(rates, dense, rows)
        + through(rates, c.vocab_size / tp * c.hidden_size, rows),
    )


def draft(
    config: ModelConfig, drafter: DrafterConfig, tp: int, context: int, rates: Rates
) -> float:
    """Seconds of drafting and of taking over committed rows, all weights cut into tp parts."""
    d, width = drafter, drafter.hidden_size
    heads = d.num_attention_heads + d.num_key_value_heads
    layer = 2 * width * heads * d.head_dim + 3 * width * d.intermediate_size
    weights = d.num_hidden_layers * layer + len(d.target_layer_ids) * width * width
    keys = d.num_hidden_layers * 2 * d.num_key_value_heads * d.head_dim * BF16 / tp
    head = config.vocab_size / tp * width
    return (
        through(rates, weights / tp, d.block_size)
        + through(rates, head, d.block_size)
        + context * keys / rates[0]
    )
