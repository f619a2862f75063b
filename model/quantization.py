"""The quantization_config section: compressed-tensors `pack-quantized` INT4 in groups of 32.

Other formats are refused by name here, before a tensor is looked at.
"""

import re
from dataclasses import dataclass, fields
from functools import lru_cache

from ddtree_numba.model.fields import Fields
from ddtree_numba.spec.numerics import GROUP

SUPPORTED = "only compressed-tensors pack-quantized INT4 with group_size 32 can be loaded"
FORMATS = {
    "fp8": "FP8",
    "float-quantized": "FP8",
    "naive-quantized": "unpacked",
    "int-quantized": "INT8",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "marlin-24": "2:4 sparse",
    "modelopt": "ModelOpt",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
}
# key of the weights section -> the value this format must have
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


@dataclass(frozen=True)
class Quantization:
    """Which modules the checkpoint stores packed, and in what groups."""

    group_size: int
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """Does config.json say that the linear module of this stored name is packed?"""
        return _listed(module, self.targets) and not _listed(module, self.ignore)


def _listed(module: str, entries: tuple[str, ...]) -> bool:
    """`re:` entries match from the start of a name; others are an exact name or the class Linear.

    The section sits in text_config, whose own names lack the `language_model.` of the files, so
    both forms of a name are tried.
    """
    exact, patterns = _compiled(entries)
    names = {module, module.removeprefix("language_model.")}
    if "Linear" in exact or names & exact:
        return True
    return any(pattern.match(name) for pattern in patterns for name in names)


@lru_cache
def _compiled(entries: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """(exact names, patterns)."""
    exact = frozenset(entry for entry in entries if not entry.startswith("re:"))
    return exact, tuple(re.compile(entry[3:]) for entry in entries if entry not in exact)


def read_quantization(top: Fields, text: Fields) -> Quantization | None:
    """The section of the top level or of text_config; where both have one they must agree."""
    sections = [top.section("quantization_config")]
    if text is not top:
        sections.append(text.section("quantization_config"))
    found = [_parse(section) for section in sections if section is not None]
    if len(found) == 2:
        for field in fields(Quantization):
            one, other = (getattr(quantization, field.name) for quantization in found)
            if one != other:
                complaint = f"differs between top level ({one}) and text_config ({other})"
                raise top.error(f"quantization_config: {field.name}", complaint)
    return found[0] if found else None


def _parse(section: Fields) -> Quantization:
    for key, expected in (("quant_method", "compressed-tensors"), ("format", "pack-quantized")):
        value = section.require(key)
        if value != expected:
            algorithm = section.get("quant_algo") or FORMATS.get(str(value), "unknown format")
            raise section.error(key, f"is {value!r} ({algorithm}): {SUPPORTED}")
    if "kv_cache_scheme" in section:
        raise section.error("kv_cache_scheme", "is set: a quantized cache is not supported")
    section.expect("quantization_status", "compressed")
    groups = section.section("config_groups")
    if groups is None or len(groups) != 1:
        raise section.error("config_groups", "must hold exactly one group")
    group = groups.section(next(iter(groups)))
    weights = group.section("weights") if group else None
    if group is None or weights is None:
        raise section.error("config_groups", "has no weights section")
    for key in ("input_activations", "output_activations"):
        if key in group:
            raise group.error(key, f"is set: activations stay in bfloat16; {SUPPORTED}")
    return Quantization(
        group_size=_check_weights(weights),
        targets=_patterns(group, "targets", ["Linear"]),
        ignore=_patterns(section, "ignore", []),
    )


def _check_weights(weights: Fields) -> int:
    for key, expected in WEIGHTS.items():
        if weights.require(key) != expected:
            raise weights.error(key, f"is {weights[key]!r}, not {expected!r}: {SUPPORTED}")
    if weights.get("actorder", False) is not False:
        raise weights.error("actorder", f"is {weights['actorder']!r}: {SUPPORTED}")
    weights.expect("dynamic", False)
    if "block_structure" in weights:
        raise weights.error("block_structure", f"is {weights['block_structure']!r}: {SUPPORTED}")
    size = weights.integer("group_size")
    if size != GROUP:
        raise weights.error("group_size", f"is {size}: {SUPPORTED}")
    return size


def _patterns(section: Fields, key: str, default: list[str]) -> tuple[str, ...]:
    patterns = section.get(key, default)
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise section.error(key, f"must be a list of names, not {patterns!r}")
    for pattern in patterns:
        try:
            _compiled((pattern,))
        except re.error as error:
            raise section.error(key, f"holds a broken pattern {pattern!r}: {error}") from None
    return tuple(patterns)
