"""What rank 0 announces, as bytes: JSON, and the arrays behind it.

Only the types that rounds are made of can be written or read; nothing that is read is run.
"""

import dataclasses
import json
import struct
from typing import Any

import numpy as np

from ddtree_numba.budget import StepTimes
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.players import Given, Order
from ddtree_numba.sampling import SamplingParams
from ddtree_numba.verbs import Plan

LENGTH = struct.Struct("<I")
RECORDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Order, Given, Plan, StepTimes, SamplingParams, VerifyInput)
}


def encode(value: Any) -> bytes:
    """A value of plain types, tuples, dictionaries, arrays and `RECORDS`."""
    arrays: list[bytes] = []
    text = json.dumps(_plain(value, arrays)).encode()
    return LENGTH.pack(len(text)) + text + b"".join(arrays)


def decode(data: bytes) -> Any:
    """The value; lists come back as tuples, arrays as new ones."""
    start = LENGTH.size + LENGTH.unpack_from(data)[0]
    value, end = _value(json.loads(data[LENGTH.size : start]), data, start)
    assert end == len(data)
    return value


def _plain(value: Any, arrays: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, dict):
        return {"dict": [list(value), _plain(list(value.values()), arrays)]}
    if isinstance(value, np.ndarray):
        arrays.append(value.tobytes())
        return {"array": [value.dtype.str, value.shape]}
    name = type(value).__name__
    if RECORDS.get(name) is not type(value):
        raise TypeError(f"{name} cannot be sent to other ranks")
    fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return {name: _plain(fields, arrays)}


def _value(plain: Any, data: bytes, at: int) -> tuple[Any, int]:
    """The value, and where in `data` the arrays after its own begin."""
    if isinstance(plain, list):
        items = []
        for item in plain:
            one, at = _value(item, data, at)
            items.append(one)
        return tuple(items), at
    if not isinstance(plain, dict):
        return plain, at
    ((kind, content),) = plain.items()
    if kind == "array":
        dtype, shape = np.dtype(content[0]), tuple(content[1])
        count = int(np.prod(shape))
        array = np.frombuffer(data, dtype, count, at).reshape(shape).copy()
        return array, at + array.nbytes
    if kind == "dict":
        values, at = _value(content[1], data, at)
        return dict(zip(content[0], values, strict=True)), at
    fields, at = _value(content, data, at)
    return RECORDS[kind](*fields), at
