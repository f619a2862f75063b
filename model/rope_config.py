"""The rotary section of a config.json, old spelling or new, as one normalised dictionary.

Old: `rope_theta` beside `rope_scaling` (type). New (transformers 5): `rope_parameters` with
`rope_theta` and `rope_type` inside. Result: (theta, scaling); scaling is None without YaRN, else
the keys of DEFAULTS and rope_type, factor, original_max_position_embeddings, and attention_factor
where the file gives one.
"""

from typing import Any

from ddtree_numba.model.fields import Fields
from ddtree_numba.spec.rope import yarn_amplitude, yarn_mscale

# Missing keys mean what DeepSeek's modelling code makes of them.
DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
YARN = ("yarn", "deepseek_yarn")


def rope_config(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """(rope_theta, rope_scaling) of a model or drafter section."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    readings = []
    for section in (new, old):
        if section is not None:
            holder = section if "rope_theta" in section else fields
            readings.append((holder.number("rope_theta"), _scaling(section)))
    if not readings:
        readings.append((fields.number("rope_theta"), None))
    if readings[0][0] <= 1:
        raise fields.error("rope_theta", f"must be above 1, not {readings[0][0]}")
    if any(reading != readings[0] for reading in readings):
        raise fields.error("rope_scaling", "contradicts rope_parameters")
    if new is not None and fields.get("rope_theta", readings[0][0]) != readings[0][0]:
        raise fields.error("rope_theta", "contradicts rope_parameters.rope_theta")
    return readings[0]


def _scaling(section: Fields) -> dict[str, Any] | None:
    kind = section.get("rope_type", section.get("type"))
    if kind in (None, "default") and "factor" not in section:
        return None
    if kind not in YARN:
        key = "rope_type" if "rope_type" in section else "type"
        raise section.error(key, f"is {kind!r}; only 'yarn' and 'deepseek_yarn' are supported")
    section.expect("truncate", True)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": section.number("factor")}
    if scaling["factor"] < 1:
        raise section.error("factor", f"must be at least 1, not {scaling['factor']}")
    scaling |= {key: section.number(key, default) for key, default in DEFAULTS.items()}
    for key in ("beta_fast", "beta_slow"):
        if scaling[key] <= 0:
            raise section.error(key, f"must be above 0, not {scaling[key]}")
    original = "original_max_position_embeddings"
    scaling[original] = section.integer(original)
    if "attention_factor" in section:
        scaling["attention_factor"] = section.number("attention_factor")
    return scaling


def draft_attention_factor(scaling: dict[str, Any] | None) -> float:
    """What multiplies cos and sin of the drafter.

    Plain "yarn" means 0.1 ln(factor) + 1: the engines for which the published drafters were tuned
    ignore mscale there, and honouring it was seen to lower acceptance. "deepseek_yarn" means the
    ratio of the two mscale terms, 1.0 for the published values.
    """
    if scaling is None:
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if scaling["rope_type"] == "yarn":
        return yarn_mscale(scaling["factor"], 1.0)
    return yarn_amplitude(scaling)
