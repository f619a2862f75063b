"""Comparing weights: the arrays inside nested dataclasses, bit for bit."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def leaves(value: Any) -> Iterator[np.ndarray]:
    """Every array inside, in the order of the fields."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from leaves(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal dtype, shape and bits."""
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
