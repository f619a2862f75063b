"""From a kernel's Python to machine code for a named architecture, on any machine.

Numba writes PTX, nvJitLink makes the cubin; neither needs a GPU or a driver. Products and sums are
never contracted, so that plain arithmetic rounds after every operation, as numpy's does, in every
instantiation. A kernel in which float32 slipped into float64 is refused.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

MAX_SHARED = 99 * 1024  # bytes of a block on sm_120, static and dynamic
LARGE_SHARED = 227 * 1024  # and on sm_90
PTX_VERSION = (9, 0)  # what a CUDA 13.0 driver reads
# PTX is made for sm_90 at most: for sm_120 NVVM keeps some local arrays in memory. ptxas goes on.
NEWEST_PTX_TARGET = (9, 0)
PACKAGES = ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")
# Waits for the kernel ahead of it need sm_90; before that, kernels on a stream never overlap.
DEPENDENT_LAUNCH = (9, 0)
STATIC_SHARED = re.compile(r"\.shared \.align (\d+) \.b8 \w+\[(\d+)\]")
CONTRACTIBLE = re.compile(r"(?<![.\w])(?:add|sub|mul|mad|fma)(?:\.ftz)?\.f(?:32|64)\b")


class CompileError(RuntimeError):
    """A kernel that does not become machine code; one line."""


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel and what it needs of a multiprocessor."""

    name: str
    arch: str
    cubin: bytes
    registers: int
    shared_bytes: int  # static
    stack_bytes: int
    spill_bytes: int


@cache
def versions() -> dict[str, str]:
    """Of everything that shapes machine code."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def target_of(arch: str) -> tuple[int, int]:
    """(12, 0) of sm_120."""
    found = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if not found:
        raise CompileError(f"architecture {arch!r} is not of the form sm_90")
    return int(found[1]), int(found[2])


def ptx_target(arch: str) -> tuple[int, int]:
    return min(target_of(arch), NEWEST_PTX_TARGET)


def ptx_of(
    function: Any,
    signature: Any,
    target: tuple[int, int],
    *,
    name: str,
    launch_bounds: tuple[int, int],
    float64: bool = False,
) -> str:
    """PTX whose one entry is called `name`."""
    from numba.cuda import compiler

    with compiler.global_compiler_lock:
        # what cuda.compile_ptx does, with one option more
        library, _ = compiler._compile_pyfunc_with_fixup(
            function, signature, device=False, abi="numba", cc=target, launch_bounds=launch_bounds
        )
        library._nvvm_options["fma"] = 0
        (ptx,) = library.get_asm_strs(cc=target)
    if target < DEPENDENT_LAUNCH:
        ptx = re.sub(r"griddepcontrol\.\w+ *;", "", ptx)
    ptx = readable(ptx, name)
    refuse_surprises(ptx, name, float64)
    return ptx


def readable(ptx: str, name: str) -> str:
    """The entry renamed from its mangled form, the version one that the driver reads."""
    entry = re.search(r"\.entry\s+(\w+)\s*\(", ptx)
    if entry is None:
        raise CompileError(f"{name}: no kernel in the PTX")
    ptx = ptx.replace(entry[1], name)
    version = tuple(map(int, re.search(r"^\.version (\d+)\.(\d+)", ptx, re.M).groups()))  # type: ignore[union-attr]
    if version > PTX_VERSION:
        newest = ".".join(map(str, PTX_VERSION))
        ptx = re.sub(r"^\.version .*$", f".version {newest}", ptx, count=1, flags=re.M)
    return ptx


def static_shared(ptx: str) -> int:
    """Bytes of the static shared arrays, one behind the other."""
    total = 0
    for alignment, size in STATIC_SHARED.findall(ptx):
        total = -(-total // int(alignment)) * int(alignment) + int(size)
    return total


def refuse_surprises(ptx: str, name: str, float64: bool) -> None:
    found = CONTRACTIBLE.search(re.sub(r"//.*", "", ptx))
    if found:
        raise CompileError(f"{name}: {found[0]} may be contracted; it names no rounding")
    wide = next((line.strip() for line in ptx.splitlines() if ".f64" in line and "%" in line), None)
    if wide and not float64:
        raise CompileError(
            f"{name}: float64 arithmetic ({wide}): a float literal, an integer with a float32, "
            "or a uint64 with a signed integer"
        )


def link(ptx: str, name: str, arch: str, max_registers: int | None = None) -> Compiled:
    """Machine code from PTX that `ptx_of` made, and ptxas's report on it."""
    import cuda.core as core

    options = core.LinkerOptions(
        arch=arch, ptxas_options=["-v"], max_register_count=max_registers or None
    )
    try:
        linker = core.Linker(core.ObjectCode.from_ptx(ptx.encode()), options=options)
        cubin = linker.link("cubin").code
    except Exception as error:  # the linker's errors have no common type
        used = ", ".join(f"{package} {version}" for package, version in versions().items())
        reason = " ".join(str(error).split())
        raise CompileError(f"{name}: cannot link for {arch} ({used}): {reason}") from error
    log = linker.get_info_log()

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return Compiled(
        name,
        arch,
        cubin,
        registers=number(r"Used (\d+) registers"),
        shared_bytes=static_shared(ptx),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill"),
    )
