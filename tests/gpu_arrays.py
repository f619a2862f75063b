"""Arguments of a kernel on the GPU and back, for the tests marked `gpu`."""

from typing import Any

import numpy as np


def to_gpu(value: Any) -> Any:
    """The same arguments with every numpy array as a CuPy array."""
    import cupy

    if isinstance(value, dict):
        return {name: to_gpu(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(to_gpu, value))
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def to_host(value: Any) -> Any:
    return tuple(map(to_host, value)) if isinstance(value, tuple) else value.get()
