"""CuPy with numpy behind it, as far as backend cuda asks: streams do nothing, graphs are empty.

`installed` notes the launches of kernels; the CPU executor runs them if asked to. Arrays start as
zeros.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

ATTRIBUTES = dict(MultiProcessorCount=132, MaxSharedMemoryPerMultiprocessor=228 << 10)  # an H200's


class Device(contextlib.nullcontext):
    id, attributes, pci_bus_id = 0, ATTRIBUTES, "0000:4A:00.0"

    def __init__(self, index: int = 0) -> None:
        super().__init__()


class Stream(contextlib.nullcontext):
    def __init__(self, **options: Any) -> None:
        super().__init__()

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def begin_capture(self) -> None: ...

    def end_capture(self) -> Any:
        return SimpleNamespace(launch=lambda stream: None)


class Event:
    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class Array(np.ndarray):
    """An array of the device: what the launchers and `CudaArrays.host` ask of one."""

    device = SimpleNamespace(id=None)

    def get(self, **options: Any) -> np.ndarray:
        return np.array(self)


class MemoryPool:
    def __init__(self, allocator: Any = None) -> None:
        self.malloc = allocator

    def free_all_blocks(self) -> None: ...


def module() -> ModuleType:
    made = ModuleType("cupy")
    given = dict(
        ndarray=Array,
        asarray=lambda host: np.array(host).view(Array),
        empty=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
        maximum=np.maximum,
        minimum=np.minimum,
        sum=lambda array, out: None,
        full=lambda shape, value, dtype: np.full(shape, value, dtype).view(Array),
        take=lambda rows, path, axis: np.take(rows, path, axis).view(Array),
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
        get_default_pinned_memory_pool=MemoryPool,
        cuda=SimpleNamespace(
            Device=Device,
            Event=Event,
            Memory=None,
            MemoryPointer=None,
            MemoryPool=MemoryPool,
            Stream=Stream,
            get_elapsed_time=lambda begin, end: 1.0,
            using_allocator=lambda allocate: contextlib.nullcontext(),
        ),
    )
    for name, value in given.items():
        setattr(made, name, value)
    return made


@contextlib.contextmanager
def installed(run: bool = False) -> Iterator[list[tuple[str, tuple]]]:
    """`import cupy` gives the stand-in; yields (kernel, its arguments) of every launch."""
    from ddtree_numba.kernels.launch import Kernel
    from ddtree_numba.model import cuda_arrays

    launches: list[tuple[str, tuple]] = []
    original = Kernel.launch

    def launch(self: Kernel, grid: Any, *arguments: Any, stream: Any = None) -> None:
        launches.append((self.name, arguments))
        if run:
            original(self, grid, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", module())
        patch.setattr(Kernel, "launch", launch)
        patch.setattr(cuda_arrays, "check_device", lambda: "a stand-in")
        yield launches
