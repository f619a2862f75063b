"""What a checkpoint needs, from config.json alone: tensors, bytes a rank, context that fits a card.

Bytes come from the table of names.py, the one that the loader cuts by. A card holds one rank's
weights, the latent cache (the same on every rank), the drafter's cache (its key/value heads are
cut), and a reserve.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ddtree_numba.model.config import DrafterConfig, ModelConfig, check_pair
from ddtree_numba.model.fields import CheckpointError
from ddtree_numba.model.names import Piece, drafter_pieces, target_pieces
from ddtree_numba.model.sharding import check_tp, drafter_shares, target_shares, tp_sizes

GIB = 1 << 30
CARD_BYTES = 97_887 << 20  # RTX PRO 6000 Blackwell: 95.59 GiB
RESERVE_BYTES = 4 * GIB  # CUDA context, graphs, activations, workspaces
CACHE_ITEMSIZE = 2  # bfloat16


@dataclass(frozen=True)
class Part:
    """Tensors of one section of the model: the whole checkpoint's, and one rank's bytes of them."""

    title: str
    tensors: int
    bytes: int
    rank_bytes: int


@dataclass(frozen=True)
class Plan:
    """The answer, in bytes and tokens; `render` prints it."""

    tp: int
    tp_sizes: tuple[int, ...]
    target: tuple[Part, ...]
    drafter: tuple[Part, ...]
    cache_bytes: int  # a token, on every rank
    drafter_cache_bytes: int  # a token, on every rank
    card_bytes: int
    reserve_bytes: int
    context_limit: int  # max_position_embeddings

    @property
    def rank_bytes(self) -> int:
        """Weights of target and drafter on one card."""
        return total(self.target).rank_bytes + total(self.drafter).rank_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of a card for the cache; negative if the weights do not fit."""
        return self.card_bytes - self.rank_bytes - self.reserve_bytes

    @property
    def cache_tokens(self) -> int:
        """Tokens of all requests together that the rest of a card holds."""
        return max(0, self.free_bytes // (self.cache_bytes + self.drafter_cache_bytes))

    @property
    def context(self) -> int:
        """The longest single request."""
        return min(self.cache_tokens, self.context_limit)


def plan(
    config: ModelConfig,
    drafter_config: DrafterConfig | None = None,
    tp: int = 1,
    card_bytes: int = CARD_BYTES,
    reserve_bytes: int = RESERVE_BYTES,
) -> Plan:
    """Sizes for `tp` cards; raises CheckpointError if the model cannot be cut into so many."""
    check_tp(config, tp, drafter_config)
    if config.quantization is None and config.first_k_dense_replace < config.num_hidden_layers:
        raise CheckpointError(
            "config.json has no quantization_config: routed experts in plain bfloat16 "
            "cannot be loaded, only INT4 pack-quantized ones"
        )
    shares = target_shares(config)
    drafter: tuple[Part, ...] = ()
    drafter_cache = 0
    if drafter_config is not None:
        check_pair(config, drafter_config)
        shares += drafter_shares(drafter_config)
        drafter = _parts(drafter_pieces(drafter_config), tp)
        row = drafter_config.num_key_value_heads // tp * drafter_config.head_dim
        drafter_cache = drafter_config.num_hidden_layers * 2 * row * CACHE_ITEMSIZE
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    return Plan(
        tp=tp,
        tp_sizes=tuple(tp_sizes(shares)),
        target=_parts(target_pieces(config), tp),
        drafter=drafter,
        cache_bytes=config.num_hidden_layers * latent * CACHE_ITEMSIZE,
        drafter_cache_bytes=drafter_cache,
        card_bytes=card_bytes,
        reserve_bytes=reserve_bytes,
        context_limit=config.max_position_embeddings,
    )


def total(parts: Iterable[Part], title: str = "total") -> Part:
    parts = list(parts)
    return Part(
        title,
        sum(part.tensors for part in parts),
        sum(part.bytes for part in parts),
        sum(part.rank_bytes for part in parts),
    )


def _parts(pieces: Iterable[Piece], tp: int) -> tuple[Part, ...]:
    """Count and add up, section by section."""
    sums: dict[str, list[int]] = {}
    for piece in pieces:
        numbers = sums.setdefault(piece.section, [0, 0, 0])
        numbers[0] += 1
        numbers[1] += piece.local_bytes(1)
        if not piece.name.endswith(".weight_shape"):  # checked while loading, then dropped
            numbers[2] += piece.local_bytes(tp)
    return tuple(Part(title, *numbers) for title, numbers in sums.items())


def render(plan: Plan) -> str:
    """The plan as lines of text."""
    unit = "GiB" if total(plan.target).bytes >= GIB else "MiB"
    head = f"{'':20}{'tensors':>10}{'bytes':>18}{unit:>10}{unit + ' a rank':>12}"
    lines = [f"{plan.tp} rank{'s' * (plan.tp > 1)} (possible: {_listed(plan.tp_sizes)})", "", head]
    for parts, title in ((plan.target, "target"), (plan.drafter, "drafter")):
        if parts:
            lines += [_row(part, unit) for part in (*parts, total(parts, title))]
    if not plan.drafter:
        lines.append("no drafter named: none is counted")
    sizes = [plan.card_bytes, plan.rank_bytes, plan.reserve_bytes, plan.free_bytes]
    card, weights, reserve, free = (size / GIB for size in sizes)
    token = plan.cache_bytes + plan.drafter_cache_bytes
    lines += [
        "",
        f"cache            {token:,} bytes a token and rank"
        f" ({plan.cache_bytes:,} latent, {plan.drafter_cache_bytes:,} drafter)",
        f"card             {card:.2f} GiB - {weights:.2f} weights - {reserve:.2f} reserve"
        f" = {free:.2f} GiB for the cache",
    ]
    if plan.free_bytes < 0:
        lines.append(f"context          does not fit: {-free:.2f} GiB too much for a card")
    else:
        limit = f"model limit {plan.context_limit:,}"
        lines.append(f"cache holds      {plan.cache_tokens:,} tokens of all requests together")
        lines.append(f"longest context  {plan.context:,} tokens ({limit})")
    return "\n".join(lines)


def _row(part: Part, unit: str) -> str:
    size = GIB if unit == "GiB" else 1 << 20
    sizes = f"{part.bytes:>18,}{part.bytes / size:>10.2f}{part.rank_bytes / size:>12.2f}"
    return f"{part.title:20}{part.tensors:>10,}{sizes}"


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
