"""The config.json of a DFlash drafter as one frozen record.

Taps and mask token must be named by the file: a guessed tap list loads, runs, and drafts badly in
silence. Keys of later drafters (DFlash2, causal heads, scaled embeddings) change the maths and are
refused by name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_numba.model.fields import Fields
from ddtree_numba.model.rope_config import draft_attention_factor, rope_config

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
LAYER_TYPES = ("full_attention", "sliding_attention")
DFLASH_KEYS = {
    "target_layer_ids",
    "mask_token_id",
    "mask_token",
    "block_size",
    "num_target_layers",
    "is_causal",
}
# Keys that change the maths, with the value that means "absent".
NEUTRAL: dict[str, Any] = {
    "causal_head": False,
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": False,
    "output_multiplier": 1.0,
    "selector_top_k": False,
}


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and constants of the drafter, under their published names."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rope_attention_factor: float  # multiplies cos and sin
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based layers whose output is tapped
    num_target_layers: int
    is_causal: bool | None  # None: sliding layers are causal inside the block, full ones are not
    layer_types: tuple[str, ...]
    sliding_window: int | None
    vocab_size: int

    def visibility(self, layer: int) -> tuple[bool, int | None]:
        """(causal inside the block, window) of one layer; window None sees the whole context."""
        sliding = self.layer_types[layer] == "sliding_attention"
        causal = sliding if self.is_causal is None else self.is_causal
        return causal, self.sliding_window if sliding else None


def load_drafter_config(
    folder: str | Path, rope_attention_factor: float | None = None
) -> DrafterConfig:
    """The configuration of the drafter in `folder`.

    rope_attention_factor: what multiplies cos and sin; None takes `draft_attention_factor`.

    Raises CheckpointError, one line naming file, key and value.
    """
    top = Fields.read(Path(folder) / "config.json")
    dflash = top.section("dflash_config") or Fields({}, top.path, "dflash_config.")
    _check_supported(top, dflash)
    for key in ("target_layer_ids", "mask_token_id"):
        dflash.require(key)
    sizes = {key: top.integer(key) for key in SIZES}
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        complaint = f"is {sizes['num_attention_heads']}, not a multiple of num_key_value_heads"
        raise top.error("num_attention_heads", f"{complaint} ({sizes['num_key_value_heads']})")
    if sizes["head_dim"] % 2:
        raise top.error("head_dim", f"must be even, not {sizes['head_dim']}")
    depth = _either(dflash, top, "num_target_layers").integer("num_target_layers")
    mask = dflash.integer("mask_token_id", least=0)
    if mask >= sizes["vocab_size"]:
        vocabulary = sizes["vocab_size"]
        raise dflash.error("mask_token_id", f"is {mask}, outside the vocabulary of {vocabulary}")
    theta, scaling = rope_config(top)
    if rope_attention_factor is None:
        rope_attention_factor = draft_attention_factor(scaling)
    layer_types, window = _layer_types(top, sizes["num_hidden_layers"])
    causal = _either(dflash, top, "is_causal").get("is_causal")
    if causal not in (None, True, False):
        raise top.error("is_causal", f"must be true or false, not {causal!r}")
    return DrafterConfig(
        **sizes,
        rms_norm_eps=top.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_attention_factor=float(rope_attention_factor),
        block_size=_either(dflash, top, "block_size").integer("block_size", 16),
        mask_token_id=mask,
        target_layer_ids=_taps(dflash, depth),
        num_target_layers=depth,
        is_causal=causal,
        layer_types=layer_types,
        sliding_window=window,
    )


def _either(first: Fields, second: Fields, key: str) -> Fields:
    """The section that holds `key`: newer files moved some keys into dflash_config."""
    return first if key in first else second


def _check_supported(top: Fields, dflash: Fields) -> None:
    names = top.get("architectures", ["DFlashDraftModel"])
    if names != ["DFlashDraftModel"]:
        raise top.error("architectures", f"is {names!r}; only DFlashDraftModel is supported")
    if "quantization_config" in top:
        raise top.error("quantization_config", "is set: a drafter must be stored in bfloat16")
    top.expect("attention_bias", False)
    top.expect("hidden_act", "silu")
    for section in (top, dflash):
        for key, neutral in NEUTRAL.items():
            if section.get(key, neutral) != neutral:
                raise section.error(key, f"is {section[key]!r}: this drafter is not supported")
    for key in dflash:
        if key not in DFLASH_KEYS | NEUTRAL.keys() and dflash[key] is not False:
            raise dflash.error(key, f"is {dflash[key]!r}: a key that is not known here")


def _taps(dflash: Fields, depth: int) -> tuple[int, ...]:
    """target_layer_ids: 0-based decoder layers, tapped after they ran (0 is not the embedding)."""
    taps = dflash.integers("target_layer_ids")
    if not taps:
        raise dflash.error("target_layer_ids", "is empty")
    for tap in taps:
        if not 0 <= tap < depth:
            complaint = f"holds {tap}; the {depth} layers of the target are 0 to {depth - 1}"
            raise dflash.error("target_layer_ids", complaint)
    return taps


def _layer_types(top: Fields, layers: int) -> tuple[tuple[str, ...], int | None]:
    """(kind of attention of each layer, sliding window or None)."""
    kinds = top.get("layer_types", ["full_attention"] * layers)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise top.error("layer_types", f"must list {layers} layers, not {kinds!r}")
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise top.error("layer_types", f"holds {kind!r}; known are {', '.join(LAYER_TYPES)}")
    if top.get("use_sliding_window", False) and "layer_types" not in top:
        raise top.error("use_sliding_window", "needs layer_types, which says for which layers")
    if "sliding_attention" not in kinds:
        return tuple(kinds), None
    return tuple(kinds), top.integer("sliding_window")
