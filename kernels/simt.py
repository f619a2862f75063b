"""Run an unmodified @cuda.jit kernel on the CPU: `run(kernel, grid, threads, arguments)`.

The kernel's function, and the device functions it refers to, are copied with other meanings for
`cuda`, `ptx`, `math` and Numba's types; the code is the same. What goes wrong is raised as a
`Fault` that names kernel, line, block and thread.

It shows: divergent warp operations and barriers, deadlocks, accesses out of bounds or misaligned,
uninitialised reads of shared and local memory, races on shared memory, asynchronous copies read
too early, writes to read-only arguments; `shuffled`, results that depend on which block, warp or
lane comes first. It does not show: the memory model between blocks, float64 where float32 was meant
(the compiled code does), wrap-around at 32 or 64 bits outside of int32() and its kin, time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.kernels import (
    asm,
    ptx,
    ptx_cpu,
    ptx_cpu_arithmetic,
    ptx_cpu_copies,
    simt_launches,
)
from ddtree_numba.kernels.arguments import Pointer as PointerKind
from ddtree_numba.kernels.arguments import code_of, parameters
from ddtree_numba.kernels.compile import MAX_SHARED
from ddtree_numba.kernels.simt_cuda import CASTS, CUDA, MATH
from ddtree_numba.kernels.simt_memory import Memory, Pointer
from ddtree_numba.kernels.simt_shared import SharedMemory
from ddtree_numba.kernels.simt_threads import WARP, Block, Fault, Site, Thread, now, run_blocks

MAX_THREADS = 1024
OWN = "ddtree_numba.kernels."

_one_at_a_time = Lock()  # which thread runs is kept in one place
copied: set = set()  # code of kernels and device functions, to tell their lines from ours


@cache
def on_cpu(function: Callable) -> FunctionType:
    """A copy of a kernel or device function whose names mean their counterparts here."""
    function = getattr(function, "py_func", function)
    names = function.__globals__
    meant = {name: _meaning(names[name]) for name in _names(function.__code__) if name in names}
    meant["__builtins__"] = names["__builtins__"]
    cells = tuple(CellType(_meaning(cell.cell_contents)) for cell in function.__closure__ or ())
    copied.add(function.__code__)
    return FunctionType(
        function.__code__, meant, function.__name__, function.__defaults__, cells or None
    )


def _names(code) -> set[str]:
    inner = [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    return set(code.co_names).union(*map(_names, inner))


def _instruction(name: str) -> Callable:
    meant = (ptx_cpu, ptx_cpu_arithmetic, ptx_cpu_copies)
    return next(getattr(module, name) for module in meant if hasattr(module, name))


PTX = {id(made): name for name, made in vars(ptx).items() if hasattr(made, "declaration")}
PTX |= {id(asm.at): "at", id(asm.shared_address): "shared_address"}


def _meaning(value: Any) -> Any:
    if value is cuda:
        return CUDA
    if value is math:
        return MATH
    if id(value) in PTX:
        return _instruction(PTX[id(value)])
    if isinstance(value, ModuleType) and value.__name__.startswith(OWN):
        return _Module(value)
    if isinstance(value, types.Type) and value in CASTS:
        return CASTS[value]
    if hasattr(value, "py_func"):
        return on_cpu(value)
    return value


class _Module:
    """A module of kernels, seen from a kernel: its attributes have their meanings here."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = _meaning(getattr(self._module, name))
        setattr(self, name, found)
        return found


def _argument(name: str, kind, value: Any) -> Any:
    """A pointer into the array, or a wrapped scalar."""
    if not isinstance(kind, PointerKind):
        return CASTS[kind.numba_type](value)
    if value is None:
        value = np.empty(0, kind.dtype)  # a null pointer: every access is out of bounds
    if value.dtype != kind.dtype:
        raise TypeError(f"{name}: dtype {value.dtype}, the kernel takes {kind.dtype}")
    return Pointer(Memory(name, value, kind.writes), code_of(kind.dtype))


def _poison(kinds: list, arguments: tuple) -> None:
    """Fill what the kernel only writes, unless it works in place."""
    given = [each for each in zip(kinds, arguments, strict=True) if isinstance(each[1], np.ndarray)]
    sources = [value for kind, value in given if kind.reads]
    for kind, value in given:
        if not kind.reads and not any(np.may_share_memory(value, source) for source in sources):
            byte = b"\xff" if kind.dtype.kind in "fV" else b"\xcd"  # NaN
            value[...] = np.frombuffer(byte * kind.dtype.itemsize, kind.dtype)[0]


def _three(shape: int | tuple[int, ...]) -> SimpleNamespace:
    x, y, z = (*((shape,) if isinstance(shape, int) else shape), 1, 1)[:3]
    return SimpleNamespace(x=int(x), y=int(y), z=int(z))


_orders: list[np.random.Generator | None] = [None]  # the last one holds


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """In launches inside, blocks, warps and lanes take turns in an order that the seed decides."""
    _orders.append(np.random.default_rng(seed))
    try:
        yield
    finally:
        _orders.pop()


class Launch:
    """One launch: what `run_together` runs beside others."""

    def __init__(self, kernel, grid, threads, arguments, *, shared_bytes=0):
        function = getattr(kernel, "body", getattr(kernel, "py_func", kernel))
        self.name = getattr(kernel, "name", function.__name__)
        self.grid, self.shape = _three(grid), _three(threads)
        self.shared_bytes = shared_bytes
        size = self.shape.x * self.shape.y * self.shape.z
        if not 0 < size <= MAX_THREADS:
            raise ValueError(f"{self.name}: {size} threads a block, at most {MAX_THREADS}")
        kinds = parameters(function)
        if len(arguments) != len(kinds):
            raise TypeError(f"{self.name} takes {len(kinds)} arguments, got {len(arguments)}")
        _poison(list(kinds.values()), arguments)
        given = zip(kinds.items(), arguments, strict=True)
        bound = [_argument(name, kind, value) for (name, kind), value in given]
        self.memories = [each.memory for each in bound if isinstance(each, Pointer)]
        self.dependent = getattr(kernel, "pdl", False)
        self.waited = False  # a thread, for the kernel ahead
        self.early = False  # a thread let the next kernel start before it waited
        meant = on_cpu(function)
        self.random = _orders[-1]

        def body() -> None:
            try:
                with np.errstate(all="ignore"):  # as quiet as a GPU; a greenlet has its own state
                    meant(*bound)
            except Exception as error:
                raise self._located(error) from error

        self.body = body

    def in_turn(self, items: Sequence) -> Sequence:
        """As they take turns: in their own order, or in one that `shuffled` draws."""
        if self.random is None:
            return items
        return [items[i] for i in self.random.permutation(len(items))]

    def _located(self, error: Exception) -> Exception:
        """The error as a fault of the running thread, in the innermost line of its own code."""
        place, trace = "", error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in copied:
                place = str(Site(trace.tb_frame.f_code, line=trace.tb_lineno))
            trace = trace.tb_next
        text = str(error) if isinstance(error, Fault) else f"{type(error).__name__}: {error}"
        return now.block.fault(now.thread, text, place)

    def blocks(self):
        for i in self.in_turn(range(self.grid.x * self.grid.y * self.grid.z)):
            x, y = i % self.grid.x, i // self.grid.x % self.grid.y
            where = SimpleNamespace(x=x, y=y, z=i // (self.grid.x * self.grid.y))
            memory = SharedMemory(self.shared_bytes, MAX_SHARED)
            yield Block(self, where, memory)


def _enter(thread: Thread) -> None:
    """Make `thread` the one that runs."""
    block = thread.block
    now.thread, now.block = thread, block
    CUDA.threadIdx, CUDA.laneid = thread.position, thread.index % WARP
    CUDA.blockIdx, CUDA.blockDim, CUDA.gridDim = (
        block.position,
        block.launch.shape,
        block.launch.grid,
    )


def run(kernel, grid, threads, arguments, *, shared_bytes: int = 0) -> None:
    """Run `kernel` on numpy arrays, in place."""
    launch = Launch(kernel, grid, threads, arguments, shared_bytes=shared_bytes)
    with simt_launches.seen(launch):
        run_together([launch])


def run_together(launches: list[Launch]) -> None:
    """Run launches that wait for each other, as on several devices."""
    with _one_at_a_time:
        run_blocks((block for launch in launches for block in launch.blocks()), _enter)
