"""The published config.json of Kimi K2, K2.5 and K2.6, flat or nested, as one frozen record.

`load_config` reads every value from the checkpoint and knows no default for a size, an epsilon or
an end token: releases differ in all of them. What would change the forward pass and is not
implemented is refused by name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_numba.model.drafter_config import DrafterConfig, load_drafter_config
from ddtree_numba.model.fields import CheckpointError, Fields
from ddtree_numba.model.quantization import Quantization, read_quantization
from ddtree_numba.model.rope_config import rope_config

__all__ = [
    "CheckpointError",
    "DrafterConfig",
    "ModelConfig",
    "check_pair",
    "load_config",
    "load_drafter_config",
]

MODEL_TYPES = ("kimi_k25", "kimi_k2", "deepseek_v3")
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "max_position_embeddings",
    "vocab_size",
)
# key -> the values that the forward pass implements; the first is also what an absent key means
FIXED: dict[str, tuple[Any, ...]] = {
    "n_group": (1,),
    "topk_group": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of the target, under their published names.

    `shards_latents` is of no file: a rank computes its part of the first projection of attention
    and gathers the others', where it would else compute all of it. Fewer bytes, one gather a layer.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    rms_norm_eps: float
    mla_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    quantization: Quantization | None
    shards_latents: bool = False


def load_config(folder: str | Path, mla_norm_eps: float | None = None) -> ModelConfig:
    """The configuration of the checkpoint in `folder`.

    mla_norm_eps: epsilon of the two latent norms. SGLang and vLLM use rms_norm_eps there, the
    default;
        the published modelling code uses 1e-6.
    Raises CheckpointError, one line naming file, key and value.
    """
    path = Path(folder) / "config.json"
    top = Fields.read(path)
    text = top.section("text_config") or top
    for section in {id(top): top, id(text): text}.values():
        _check_type(section)
    for key, allowed in FIXED.items():
        text.expect(key, *allowed)
    sizes: dict[str, Any] = {key: text.integer(key) for key in SIZES}
    quantization = read_quantization(top, text)
    _check_sizes(text, sizes, quantization)
    theta, scaling = rope_config(text)
    if scaling is not None and "attention_factor" in scaling:
        raise text.error("rope_scaling.attention_factor", "is set; only mscale is supported")
    epsilon = text.number("rms_norm_eps")
    if mla_norm_eps is None:
        mla_norm_eps = text.number("mla_norm_eps", epsilon)
    dense = text.integer("first_k_dense_replace", least=0)
    return ModelConfig(
        **sizes,
        first_k_dense_replace=min(dense, sizes["num_hidden_layers"]),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        rms_norm_eps=epsilon,
        mla_norm_eps=mla_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        eos_token_ids=_end_tokens(Path(folder), top, text, sizes["vocab_size"]),
        bos_token_id=_token(top, text, "bos_token_id", sizes["vocab_size"]),
        pad_token_id=_token(top, text, "pad_token_id", sizes["vocab_size"]),
        quantization=quantization,
    )


def check_pair(
    config: ModelConfig,
    drafter: DrafterConfig,
    folder: Path | None = None,
    drafter_folder: Path | None = None,
) -> None:
    """Do the sizes agree? The drafter borrows embedding and head, and taps layers.

    Raises CheckpointError, one line naming key and values, and the files where folders are given.
    """
    whose = "drafter" if drafter_folder is None else f"{drafter_folder / 'config.json'}:"
    target = "" if folder is None else f" ({folder / 'config.json'})"
    pairs = (
        ("hidden_size", drafter.hidden_size, config.hidden_size),
        ("vocab_size", drafter.vocab_size, config.vocab_size),
        ("num_target_layers", drafter.num_target_layers, config.num_hidden_layers),
    )
    for key, ours, theirs in pairs:
        if ours != theirs:
            raise CheckpointError(f"{whose} {key} is {ours}, the target has {theirs}{target}")


def _check_type(section: Fields) -> None:
    kind = section.require("model_type")
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise section.error("model_type", f"is {kind!r}; supported are {known}")
    for key in ("dtype", "torch_dtype"):
        if str(section.get(key, "bfloat16")).removeprefix("torch.") != "bfloat16":
            raise section.error(key, f"is {section[key]!r}; only 'bfloat16' is supported")


def _check_sizes(text: Fields, sizes: dict[str, int], quantization: Quantization | None) -> None:
    heads = sizes["num_attention_heads"]
    if text.integer("num_key_value_heads", heads) != heads:
        raise text.error("num_key_value_heads", "must equal num_attention_heads: MLA has no groups")
    if sizes["num_experts_per_tok"] > sizes["n_routed_experts"]:
        complaint = f"is {sizes['num_experts_per_tok']} of {sizes['n_routed_experts']} experts"
        raise text.error("num_experts_per_tok", complaint)
    if sizes["qk_rope_head_dim"] % 2:
        raise text.error("qk_rope_head_dim", f"must be even, not {sizes['qk_rope_head_dim']}")
    for key in ("hidden_size", "moe_intermediate_size"):
        if quantization is not None and sizes[key] % quantization.group_size:
            complaint = f"is {sizes[key]}, not a multiple of the quantization's group_size"
            raise text.error(key, f"{complaint} {quantization.group_size}")


def _token(top: Fields, text: Fields, key: str, vocab_size: int) -> int | None:
    """The id that the text model names, else the one at the top level, else None."""
    for section in (text, top):
        if key in section:
            token = section.integer(key, least=0)
            if token >= vocab_size:
                raise section.error(key, f"is {token}, outside the vocabulary of {vocab_size}")
            return token
    return None


def _end_tokens(folder: Path, top: Fields, text: Fields, vocab_size: int) -> tuple[int, ...]:
    """Every id that some file of the checkpoint calls an end token, ascending.

    Releases name [EOS] or <|im_end|> in config.json and end turns with the other, so the sources
    add up; the tokenizer adds both by name.
    """
    sections = [top, text]
    if (folder / "generation_config.json").exists():
        sections.append(Fields.read(folder / "generation_config.json"))
    tokens: set[int] = set()
    for section in sections:
        for token in section.integers("eos_token_id"):
            if not 0 <= token < vocab_size:
                complaint = f"holds {token}, outside the vocabulary of {vocab_size}"
                raise section.error("eos_token_id", complaint)
            tokens.add(token)
    return tuple(sorted(tokens))
