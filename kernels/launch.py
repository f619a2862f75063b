"""A kernel that can be launched: `@kernel(threads=256)` above `@cuda.jit`.

    rms_norm_kernel.launch(rows, x, weight, y, width, eps, stream=stream)

On numpy arrays the CPU executor runs it; on CuPy arrays it is compiled for the device, once and for
all later processes, and launched packed. Launchers do not know which. Pointers may also be given as
addresses (int), or None; scalars as Python or numpy numbers. `stream` is a CuPy stream, an address,
or None for CuPy's current one; capture into a graph happens there as for any other work.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.cuda import types

from ddtree_numba.kernels import cache, driver
from ddtree_numba.kernels.arguments import Pointer, code_of, parameters
from ddtree_numba.kernels.compile import (
    DEPENDENT_LAUNCH,
    Compiled,
    link,
    ptx_of,
    ptx_target,
    target_of,
)


class Kernel:
    """One instantiation of a kernel.

    threads: of a block. min_blocks: of a multiprocessor, for the compiler. shared_bytes: dynamic
    shared memory. max_registers: forced on the compiler. registers, opcodes: what the compile test
    holds it to. pdl: may start before the kernel ahead of it on the stream has ended; it must then
    call ptx.wait_for_previous() before it reads anything that kernel wrote. float64: meant.
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
    ):
        self.function = function
        self.body = getattr(function, "py_func", function)
        self.name = re.sub(r"\W+", "_", name or self.body.__name__).strip("_")
        self.threads, self.shared_bytes, self.pdl = threads, shared_bytes, pdl
        self.max_registers, self.registers, self.opcodes = max_registers, registers, opcodes
        self.parameters = parameters(self.body)
        kinds = list(self.parameters.values())
        self.signature = types.void(*(kind.numba_type for kind in kinds))
        self.codes = ["Q" if isinstance(kind, Pointer) else code_of(kind.dtype) for kind in kinds]
        self.count = len(kinds)
        self.pointers = [i for i, kind in enumerate(kinds) if isinstance(kind, Pointer)]
        self._options: dict[str, Any] = dict(
            name=self.name, launch_bounds=(threads, min_blocks), float64=float64
        )
        self._ptx: dict[tuple[int, int], str] = {}
        self._loaded: driver.Loaded | None = None

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
        blocks = (grid, 1, 1) if type(grid) is int else _three(grid)
        if len(arguments) != self.count:
            expected = ", ".join(self.parameters)
            raise TypeError(f"{self.name}: {len(arguments)} arguments for ({expected})")
        if 0 in blocks:
            return
        values = list(arguments)
        try:
            for i in self.pointers:
                values[i] = values[i].data.ptr
        except (AttributeError, ValueError):  # anything else than CuPy arrays
            if any(isinstance(value, np.ndarray) for value in arguments):
                return self._run_on_cpu(blocks, arguments)
            for i in self.pointers:
                values[i] = _address(arguments[i])
        if type(stream) is not int:
            stream = driver.address_of(stream)
        (self._loaded or self.load()).launch(blocks, values, stream)

    def load(self) -> driver.Loaded:
        """Compile for the current device and load; the first launch does it, capture must not."""
        device = driver.current_device()
        arch = driver.arch_of(device)
        pdl = self.pdl and target_of(arch) >= DEPENDENT_LAUNCH
        loaded = driver.Loaded(self.compile(arch), self.codes, self.threads, self.shared_bytes, pdl)
        loaded.allow_shared(device)
        self._loaded = loaded
        return loaded

    def _run_on_cpu(self, grid: tuple[int, int, int], arguments: tuple) -> None:
        given = [arguments[i] for i in self.pointers]
        if any(value is not None and not isinstance(value, np.ndarray) for value in given):
            raise TypeError(f"{self.name}: numpy arrays beside others")
        from ddtree_numba.kernels import simt

        simt.run(self, grid, self.threads, arguments, shared_bytes=self.shared_bytes)


def kernel(**options: Any) -> Callable[[Callable], Kernel]:
    """Decorator above @cuda.jit; options as of `Kernel`."""
    return lambda function: Kernel(function, **options)


def _three(grid: Any) -> tuple[int, int, int]:
    x, y, z = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
    return int(x), int(y), int(z)


def _address(pointer: Any) -> int:
    """Of a CuPy array, an address itself, or None."""
    return pointer.data.ptr if hasattr(pointer, "data") else pointer or 0
