"""SamplingParams of every row of a batch, as the next-token kernels read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_numba.kernels.numerics import LAST_ID
from ddtree_numba.spec.next_token import GREEDY_BELOW, LARGEST, TOP_P_SLACK, SamplingParams


@dataclass(frozen=True)
class Settings:
    """SamplingParams of each row, as the kernels read them; the flags say what any row asks for.

    | array       | dtype   | meaning                                 |
    |-------------|---------|-----------------------------------------|
    | temperature | float32 | 0: the row is greedy                    |
    | top_k       | int32   | 0: off                                  |
    | share       | float64 | of the mass, slack taken off; 2: off    |
    | min_p       | float32 | 0: off                                  |
    """

    temperature: Any
    top_k: Any
    share: Any
    min_p: Any
    sampled: bool
    ranked: bool
    massed: bool
    cut: bool


def settings(params: SamplingParams | Sequence[SamplingParams], rows: int) -> Settings:
    """Settings of a batch, in numpy; one SamplingParams serves all rows."""
    each = [params] * rows if isinstance(params, SamplingParams) else list(params)
    if len(each) != rows:
        raise ValueError(f"params must have {rows} entries, not {len(each)}")
    drawn = [p.temperature >= GREEDY_BELOW for p in each]
    top_k = [p.top_k if on else 0 for p, on in zip(each, drawn, strict=True)]
    massed = [on and p.top_p < 1 for p, on in zip(each, drawn, strict=True)]
    min_p = [p.min_p if on else 0.0 for p, on in zip(each, drawn, strict=True)]
    return Settings(
        temperature=np.array(
            [min(p.temperature, float(LARGEST)) * on for p, on in zip(each, drawn, strict=True)],
            np.float32,
        ),
        top_k=np.array([min(k, LAST_ID) for k in top_k], np.int32),
        share=np.array(
            [p.top_p * (1 - TOP_P_SLACK) if on else 2.0 for p, on in zip(each, massed, strict=True)]
        ),
        min_p=np.array(min_p, np.float32),
        sampled=any(drawn),
        ranked=any(k > 0 for k in top_k),
        massed=any(massed),
        cut=any(p > 0 for p in min_p),
    )
