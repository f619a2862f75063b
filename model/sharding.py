"""Which numbers of ranks a model can be cut into."""

from math import gcd

from ddtree_numba.model.config import ModelConfig
from ddtree_numba.model.drafter_config import DrafterConfig
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.spec.numerics import GROUP

VECTOR = 8  # bfloat16 numbers that a thread loads at once
Share = tuple[str, int, int]  # (option, its value, what a rank's part must be a multiple of)


def target_shares(config: ModelConfig) -> list[Share]:
    shares = [
        ("num_attention_heads", config.num_attention_heads, 1),
        ("vocab_size", config.vocab_size, 1),
    ]
    if config.shards_latents:
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        shares.append(("q_lora_rank", config.q_lora_rank, VECTOR))
        shares.append(("kv_lora_rank + qk_rope_head_dim", latent, VECTOR))
    if config.first_k_dense_replace > 0:
        shares.append(("intermediate_size", config.intermediate_size, 1))
    if config.first_k_dense_replace < config.num_hidden_layers:
        # down_proj is cut along its inputs, 32 of which share a scale
        shares.append(("moe_intermediate_size", config.moe_intermediate_size, GROUP))
    return shares


def drafter_shares(config: DrafterConfig) -> list[Share]:
    return [
        ("drafter num_attention_heads", config.num_attention_heads, 1),
        ("drafter num_key_value_heads", config.num_key_value_heads, 1),
        ("drafter intermediate_size", config.intermediate_size, 1),
        ("drafter hidden_size", config.hidden_size, 1),
    ]


def tp_sizes(shares: list[Share]) -> list[int]:
    """Every number of ranks that divides all of them."""
    if any(size % unit for _, size, unit in shares):
        return []
    common = gcd(*(size // unit for _, size, unit in shares))
    return [tp for tp in range(1, common + 1) if common % tp == 0]


def check_shares(shares: list[Share], tp: int) -> None:
    """Raises CheckpointError naming option, tp, unit and the numbers of ranks that would work."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise CheckpointError(f"tp must be a whole number of at least 1, not {tp!r}")
    for name, size, unit in shares:
        if size % (tp * unit):
            part = f"{size // tp}" if size % tp == 0 else f"{size / tp:.1f}"
            unit_name = unit if unit == VECTOR else f"the group size {unit}"
            why = "is not whole" if unit == 1 else f"is not a multiple of {unit_name}"
            works = ", ".join(map(str, tp_sizes(shares))) or "none"
            raise CheckpointError(f"{name} {size} / tp {tp} = {part} {why}; tp that works: {works}")


def check_tp(config: ModelConfig, tp: int, drafter: DrafterConfig | None = None) -> None:
    """Can the target, and the drafter where one is given, be cut into tp ranks?"""
    shares = target_shares(config)
    if drafter is not None:
        shares += drafter_shares(drafter)
    check_shares(shares, tp)
