"""One table: checkpoint tensor -> field of weights.py, slot in a fused tensor, cut, shape.

| column | meaning |
|---|---|
| name  | after the section's prefix; N is the layer, E the expert |
| field | in weights.py; several tensors with one field are stacked along rows in slot order |
| cut   | ROWS or COLUMNS: rank r of n holds the r-th n-th part; WHOLE: every rank holds it all |
|       | LATENTS: ROWS where the configuration's `shards_latents` says so, else WHOLE          |
| shape | names of `target_sizes` or `drafter_sizes`, as published, before the cut |
| kind  | BF16, F32, or INT4: weight_packed, weight_scale and weight_shape, which are cut together |

Field kv_b is the one that no forward pass reads: the loader splits its heads into w_uk and w_uv.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ddtree_numba.model.config import ModelConfig
from ddtree_numba.model.drafter_config import DrafterConfig
from ddtree_numba.spec.numerics import GROUP, PER_WORD

WHOLE, ROWS, COLUMNS, LATENTS = "whole", "rows", "columns", "latents"
ITEMSIZE = {"BF16": 2, "F32": 4, "I32": 4}


class Row(NamedTuple):
    name: str
    field: str
    slot: int
    cut: str
    shape: str
    kind: str = "BF16"


class Section(NamedTuple):
    """Rows that share a prefix; they repeat for each layer, and each expert if it has an E."""

    title: str
    layers: range
    prefix: str
    field: str
    rows: tuple[Row, ...]


class Piece(NamedTuple):
    """One tensor that a checkpoint must hold."""

    section: str
    name: str
    field: str
    expert: int
    slot: int
    cut: str
    shape: tuple[int, ...]
    dtype: str

    def local_shape(self, world: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        axis = {ROWS: 0, COLUMNS: 1}.get(self.cut)
        return tuple(n // world if i == axis else n for i, n in enumerate(self.shape))

    def local_slices(self, rank: int, world: int) -> tuple[slice, slice]:
        """(rows, columns) of one rank's part."""
        part = slice(None), slice(None)
        if self.cut == ROWS:
            size = self.shape[0] // world
            return slice(rank * size, (rank + 1) * size), part[1]
        if self.cut == COLUMNS:
            size = self.shape[1] // world
            return part[0], slice(rank * size, (rank + 1) * size)
        return part

    def local_bytes(self, world: int) -> int:
        size = ITEMSIZE[self.dtype]
        for n in self.local_shape(world):
            size *= n
        return size


# fmt: off
ENDS = (
    Row("model.embed_tokens.weight", "embed", 0, ROWS, "vocab hidden"),
    Row("model.norm.weight", "norm", 0, WHOLE, "hidden"),
    Row("lm_head.weight", "lm_head", 0, ROWS, "vocab hidden"),
)
ATTENTION = (
    Row("input_layernorm.weight", "input_norm", 0, WHOLE, "hidden"),
    Row("self_attn.q_a_proj.weight", "qkv_a", 0, LATENTS, "q_lora hidden"),
    Row("self_attn.kv_a_proj_with_mqa.weight", "qkv_a", 1, LATENTS, "latent hidden"),
    Row("self_attn.q_a_layernorm.weight", "q_a_norm", 0, WHOLE, "q_lora"),
    Row("self_attn.q_b_proj.weight", "q_b", 0, ROWS, "query q_lora"),
    Row("self_attn.kv_a_layernorm.weight", "kv_a_norm", 0, WHOLE, "kv_lora"),
    Row("self_attn.kv_b_proj.weight", "kv_b", 0, ROWS, "key_value kv_lora"),
    Row("self_attn.o_proj.weight", "o", 0, COLUMNS, "hidden value"),
    Row("post_attention_layernorm.weight", "post_norm", 0, WHOLE, "hidden"),
)
DENSE = (
    Row("gate_proj.weight", "gate_up", 0, ROWS, "dense hidden"),
    Row("up_proj.weight", "gate_up", 1, ROWS, "dense hidden"),
    Row("down_proj.weight", "down", 0, COLUMNS, "hidden dense"),
)
ROUTER = (
    Row("weight", "gate", 0, WHOLE, "experts hidden"),
    Row("e_score_correction_bias", "bias", 0, WHOLE, "experts", "F32"),
)
EXPERTS = (
    Row("gate_proj", "gate_up", 0, ROWS, "expert hidden", "INT4"),
    Row("up_proj", "gate_up", 1, ROWS, "expert hidden", "INT4"),
    Row("down_proj", "down", 0, COLUMNS, "hidden expert", "INT4"),
)
SHARED = (
    Row("gate_proj.weight", "gate_up", 0, ROWS, "shared hidden"),
    Row("up_proj.weight", "gate_up", 1, ROWS, "shared hidden"),
    Row("down_proj.weight", "down", 0, COLUMNS, "hidden shared"),
)
DRAFTER_ENDS = (
    Row("fc.weight", "fc", 0, ROWS, "hidden taps"),
    Row("hidden_norm.weight", "hidden_norm", 0, WHOLE, "hidden"),
    Row("norm.weight", "norm", 0, WHOLE, "hidden"),
)
DRAFTER_ATTENTION = (
    Row("input_layernorm.weight", "input_norm", 0, WHOLE, "hidden"),
    Row("self_attn.q_proj.weight", "qkv", 0, ROWS, "query hidden"),
    Row("self_attn.k_proj.weight", "qkv", 1, ROWS, "key hidden"),
    Row("self_attn.v_proj.weight", "qkv", 2, ROWS, "key hidden"),
    Row("self_attn.q_norm.weight", "q_norm", 0, WHOLE, "head"),
    Row("self_attn.k_norm.weight", "k_norm", 0, WHOLE, "head"),
    Row("self_attn.o_proj.weight", "o", 0, COLUMNS, "hidden query"),
    Row("post_attention_layernorm.weight", "post_norm", 0, WHOLE, "hidden"),
)
# fmt: on


def target_sizes(config: ModelConfig) -> dict[str, int]:
    heads = config.num_attention_heads
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "q_lora": config.q_lora_rank,
        "kv_lora": config.kv_lora_rank,
        "latent": config.kv_lora_rank + config.qk_rope_head_dim,
        "query": heads * (config.qk_nope_head_dim + config.qk_rope_head_dim),
        "key_value": heads * (config.qk_nope_head_dim + config.v_head_dim),
        "value": heads * config.v_head_dim,
        "dense": config.intermediate_size,
        "expert": config.moe_intermediate_size,
        "shared": config.n_shared_experts * config.moe_intermediate_size,
        "experts": config.n_routed_experts,
    }


def drafter_sizes(config: DrafterConfig) -> dict[str, int]:
    return {
        "hidden": config.hidden_size,
        "taps": len(config.target_layer_ids) * config.hidden_size,
        "query": config.num_attention_heads * config.head_dim,
        "key": config.num_key_value_heads * config.head_dim,
        "head": config.head_dim,
        "dense": config.intermediate_size,
    }


def target_pieces(config: ModelConfig) -> Iterator[Piece]:
    """Every text tensor of the target, names without `language_model.`."""
    every = range(config.num_hidden_layers)
    dense, moe = every[: config.first_k_dense_replace], every[config.first_k_dense_replace :]
    layer, mlp = "model.layers.N.", "model.layers.N.mlp."
    sections = (
        Section("embedding, head", range(1), "", "", ENDS),
        Section("attention, norms", every, layer, "layers.N.", ATTENTION),
        Section("dense MLP", dense, mlp, "layers.N.mlp.", DENSE),
        Section("router", moe, f"{mlp}gate.", "layers.N.mlp.", ROUTER),
        Section("routed experts", moe, f"{mlp}experts.E.", "layers.N.mlp.", EXPERTS),
        Section("shared expert", moe, f"{mlp}shared_experts.", "layers.N.mlp.shared.", SHARED),
    )
    latents = ROWS if config.shards_latents else WHOLE
    for piece in _expand(sections, target_sizes(config)):
        yield piece._replace(cut=latents) if piece.cut == LATENTS else piece


def drafter_pieces(config: DrafterConfig) -> Iterator[Piece]:
    """Every tensor of the drafter, names without the optional `model.`."""
    every = range(config.num_hidden_layers)
    sections = (
        Section("drafter taps, norms", range(1), "", "", DRAFTER_ENDS),
        Section("drafter attention", every, "layers.N.", "layers.N.", DRAFTER_ATTENTION),
        Section("drafter MLP", every, "layers.N.mlp.", "layers.N.mlp.", DENSE),
    )
    yield from _expand(sections, drafter_sizes(config))


def _expand(sections: tuple[Section, ...], sizes: dict[str, int]) -> Iterator[Piece]:
    for section in sections:
        experts = range(sizes["experts"]) if ".E." in section.prefix else range(1)
        stored = [tensor for row in section.rows for tensor in _stored(row, sizes)]
        for layer in section.layers:
            for expert in experts:
                prefix = section.prefix.replace(".N.", f".{layer}.").replace(".E.", f".{expert}.")
                field = section.field.replace(".N.", f".{layer}.")
                for row, shape in stored:
                    yield Piece(
                        section.title,
                        prefix + row.name,
                        field + row.field,
                        expert,
                        row.slot,
                        row.cut,
                        shape,
                        row.kind,
                    )


def _stored(row: Row, sizes: dict[str, int]) -> list[tuple[Row, tuple[int, ...]]]:
    """The tensors that stand for one row in the file, with their shapes."""
    shape = tuple(sizes[name] for name in row.shape.split())
    if row.kind != "INT4":
        return [(row, shape)]
    rows, columns = shape
    return [
        (_part(row, "packed", row.cut, "I32"), (rows, columns // PER_WORD)),
        (_part(row, "scale", row.cut, "BF16"), (rows, columns // GROUP)),
        (_part(row, "shape", WHOLE, "I32"), (2,)),
    ]


def _part(row: Row, part: str, cut: str, kind: str) -> Row:
    return row._replace(
        name=f"{row.name}.weight_{part}", field=f"{row.field}.{part}", cut=cut, kind=kind
    )


def fused_shape(pieces: Iterable[Piece], world: int) -> tuple[int, ...]:
    """(experts, rows, ...) of a rank's field: its pieces along the rows, experts stacked."""
    pieces = list(pieces)
    slots = [piece.local_shape(world) for piece in pieces if piece.expert == 0]
    return len(pieces) // len(slots), sum(shape[0] for shape in slots), *slots[0][1:]
