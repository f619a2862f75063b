"""A kernel that can be launched: `@kernel(threads=256)` above `@cuda.jit`.

    rms_norm_kernel.launch(rows, x, weight, y, width, eps, stream=stream)

On numpy arrays the CPU executor runs it; on CuPy arrays it is compiled for the device, once and for
all later processes, and launched packed. Launchers do not know which. Pointers may also be given as
addresses (int), or None; scalars as Python or numpy numbers. `stream` is a CuPy stream, an address,
or None for CuPy's current one; capture into a graph happens there as for any other work.
"""

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.cuda import types

from ddtree_numba.kernels import cache, driver
from ddtree_numba.kernels.arguments import Pointer, code_of, parameters
from ddtree_numba.kernels.compile import (
    Compiled,
    link,
    ptx_of,
    ptx_target,
)


class Kernel:
    """One instantiation of a kernel.

    threads: of a block. min_blocks: of a multiprocessor, for the compiler. shared_bytes: dynamic
    shared memory. max_registers: forced on the compiler. registers, opcodes: what the compile test
    holds it to. pdl: may start before the kernel ahead of it on the stream has ended; see below.
    float64: meant. large: needs more shared memory than a block of sm_120 has, and is launched
    elsewhere only.

    With pdl a kernel starts when each block of the one ahead has called ptx.launch_next(), by any
    thread, or ended. Of what kernels write it may touch, ahead of its ptx.wait_for_previous(), only
    what was complete when the latest kernel that calls launch_next behind its own wait did so: what
    is older than that kernel. `simt_launches.py` finds what is not. Weights always are; so short
    kernels call launch_next first, and the weights of the next one are on their way two kernels
    ahead (`linear_narrow.py` has an exception).
    """

    def __init__(
        self,
        function: Callable,
        *,
        threads: int,
        name: str = "",
        min_blocks: int = 1,
        shared_bytes: int = 0,
        max_registers: int | None = None,
        registers: int = 255,
        opcodes: tuple[str, ...] = (),
        pdl: bool = False,
        float64: bool = False,
        large: bool = False,
    ):
        self.function = function
        self.body = getattr(function, "py_func", function)
        self.name = re.sub(r"\W+", "_", name or self.body.__name__).strip("_")
        self.threads, self.shared_bytes, self.pdl = threads, shared_bytes, pdl
        self.max_registers, self.registers, self.opcodes = max_registers, registers, opcodes
        self.large = large
        self.parameters = parameters(self.body)
        kinds = list(self.parameters.values())
        self.signature = types.void(*(kind.numba_type for kind in kinds))
        self.codes = [
            driver.POINTER if isinstance(kind, Pointer) else code_of(kind.dtype) for kind in kinds
        ]
        self.pointers = [i for i, kind in enumerate(kinds) if isinstance(kind, Pointer)]
        self._options: dict[str, Any] = dict(
            name=self.name, launch_bounds=(threads, min_blocks), float64=float64
        )
        self._ptx: dict[tuple[int, int], str] = {}
        self._loaded: driver.Loaded | None = None
        self._start: Callable[..., int] = _not_loaded

    def ptx(self, arch: str) -> str:
        """The same text for all architectures from sm_90 on."""
        target = ptx_target(arch)
        if target not in self._ptx:
            self._ptx[target] = ptx_of(self.body, self.signature, target, **self._options)
        return self._ptx[target]

    def compile(self, arch: str) -> Compiled:
        """Machine code for `arch`, from the disk cache where it has it."""
        digest = cache.key(
            self.body,
            arch=arch,
            signature=str(self.signature),
            max_registers=self.max_registers,
            **self._options,
        )

        def make() -> Compiled:
            return link(self.ptx(arch), self.name, arch, self.max_registers)

        return cache.compiled(digest, f"{self.name}-{arch}", make)

    def launch(self, grid: int | tuple[int, ...], *arguments: Any, stream: Any = None) -> None:
        """`grid` blocks on numpy arrays (CPU) or CuPy arrays (GPU); nothing for an empty grid."""
        try:
            status = self._start(grid, arguments, stream)
        except (AttributeError, TypeError, ValueError, struct.error):
            return self._launch_checked(grid, arguments, stream)
        if status:
            raise driver.launch_error(self.name, status, grid)

    def _launch_checked(self, grid: Any, arguments: tuple, stream: Any) -> None:
        """The first launch, numpy arrays, addresses, and errors by name."""
        if len(arguments) != len(self.parameters):
            expected = ", ".join(self.parameters)
            raise TypeError(f"{self.name}: {len(arguments)} arguments for ({expected})")
        if 0 in driver.three(grid):
            return
        if any(isinstance(value, np.ndarray) for value in arguments):
            return self._run_on_cpu(driver.three(grid), arguments)
        named = zip(self.parameters, self.codes, arguments, strict=True)
        values = [self._checked(*each) for each in named]
        start = self.ready().start
        status = start(grid, values, stream)
        if status:
            raise driver.launch_error(self.name, status, grid)

    def _checked(self, name: str, code: str, value: Any) -> Any:
        """An argument as `start` takes it."""
        if code == driver.POINTER:
            value = _At(value) if isinstance(value, int) else value
            if value is None or hasattr(getattr(value, "data", None), "ptr"):
                return value
            raise TypeError(f"{self.name}: {name}: {type(value).__name__} is no array")
        try:
            struct.pack(code, value)
        except struct.error as error:
            raise TypeError(f"{self.name}: {name}: {value!r}: {error}") from None
        return value

    def ready(self) -> driver.Loaded:
        """Loaded for this device. Loading may wait for what runs there, so not while ranks wait."""
        return self._loaded or self.load()

    def load(self) -> driver.Loaded:
        """Compile for the current device and load; the first launch does it, capture must not."""
        device = driver.current_device()
        arch = driver.arch_of(device)
        made = self.compile(arch)
        loaded = driver.Loaded(made, self.codes, self.threads, self.shared_bytes, self.pdl)
        loaded.allow_shared(device)
        self._loaded, self._start = loaded, loaded.start
        return loaded

    def _run_on_cpu(self, grid: tuple[int, ...], arguments: tuple) -> None:
        given = [arguments[i] for i in self.pointers]
        if any(value is not None and not isinstance(value, np.ndarray) for value in given):
            raise TypeError(f"{self.name}: numpy arrays beside others")
        from ddtree_numba.kernels import simt

        simt.run(self, grid, self.threads, arguments, shared_bytes=self.shared_bytes)


def kernel(**options: Any) -> Callable[[Callable], Kernel]:
    """Decorator above @cuda.jit; options as of `Kernel`."""
    return lambda function: Kernel(function, **options)


def _not_loaded(grid: Any, arguments: tuple, stream: Any) -> int:
    raise TypeError("the first launch loads")


class _At:
    """An address where `start` looks for that of an array."""

    def __init__(self, address: int):
        self.ptr, self.data = address, self
