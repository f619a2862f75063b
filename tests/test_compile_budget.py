"""Every kernel, every instantiation of K2.6 and the embedded model, for both architectures, no GPU.

Held to what the kernel declares: registers, opcodes; and to what all must obey: no spills, no local
memory, shared memory of sm_120 (sm_90 if large). `instances()` of a kernel file says which
instantiations there are.
"""

import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, float32, int32

from bench.roof import mma_kernel
from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.compile import LARGE_SHARED, MAX_SHARED
from ddtree_numba.kernels.launch import Kernel

from .machine_code import disassembled
from .skinny_gemm import skinny_gemm

FOLDER = Path(__file__).resolve().parents[1] / "kernels"
ARCHITECTURES = ["sm_90", "sm_120"]
OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.M)
LOCAL_MEMORY = ("LDL", "STL")


def instances() -> list[Kernel]:
    """From every file of kernels/ that has a function `instances`."""
    files = [f.stem for f in sorted(FOLDER.glob("*.py")) if "def instances(" in f.read_text()]
    modules = [import_module(f"ddtree_numba.kernels.{stem}") for stem in files]
    return [made for module in modules for made in module.instances()]


INSTANCES = instances()
EVERY_RUN = 8  # instances of a kernel that every run compiles, spread evenly; -m slow: all others


def parameters() -> list:
    """An instance each; those beyond EVERY_RUN of a kernel are slow."""
    kernels: dict[str, list[Kernel]] = {}
    for kernel in INSTANCES:
        kernels.setdefault(re.split(r"_?\d", kernel.name)[0], []).append(kernel)
    chosen = set()
    for made in kernels.values():
        few = min(len(made), EVERY_RUN)
        chosen |= {made[round(i * (len(made) - 1) / max(few - 1, 1))].name for i in range(few)}
    return [
        pytest.param(k, id=k.name, marks=() if k.name in chosen else pytest.mark.slow)
        for k in INSTANCES
    ]


def opcodes(cubin: bytes, folder: Path) -> set[str]:
    return set(OPCODE.findall(disassembled(cubin, folder)))


def over_budget(kernel: Kernel, arch: str, folder: Path) -> tuple[list[str], str]:
    """What the kernel breaks, and a line for the table."""
    made = kernel.compile(arch)
    found = opcodes(made.cubin, folder)
    shared = made.shared_bytes + kernel.shared_bytes
    available = LARGE_SHARED if kernel.large else MAX_SHARED
    wrong = []
    if made.registers > kernel.registers:
        wrong.append(f"{made.registers} registers, declared {kernel.registers}")
    if made.spill_bytes or made.stack_bytes or any(o.startswith(LOCAL_MEMORY) for o in found):
        wrong.append(f"local memory: {made.stack_bytes} bytes, {made.spill_bytes} spilled")
    if shared > available:
        wrong.append(f"{shared} bytes of shared memory, {available} available")
    missing = [o for o in kernel.opcodes if not any(code.startswith(o) for code in found)]
    if missing:
        wrong.append(f"no {', '.join(missing)} in the machine code")
    line = f"{arch:6} {made.registers:3} registers {shared:6} B shared  {kernel.name}"
    return wrong, line


def test_names_of_instances_are_unique():
    names = [kernel.name for kernel in INSTANCES]
    assert len(set(names)) == len(names) and names


@pytest.mark.parametrize("kernel", parameters())
def test_kernel_keeps_its_budget(kernel, tmp_path, record_property):
    for arch in ARCHITECTURES[:1] if kernel.large else ARCHITECTURES:
        wrong, line = over_budget(kernel, arch, tmp_path)
        record_property("summary", line)
        assert not wrong, f"{kernel.name} for {arch}: {wrong}"


# --- the check itself


def test_tensor_core_instructions_are_recognised(tmp_path):
    for arch in ARCHITECTURES:
        for kernel in (skinny_gemm, mma_kernel):
            assert over_budget(kernel, arch, tmp_path)[0] == []


N = 200


@cuda.jit
def hoards(x: read(float32), y: write(float32), n: int32):
    """Two hundred live values, read back by a computed index."""
    values = cuda.local.array(N, float32)
    for i in range(N):
        values[i] = x[i]
    y[0] = values[n]


@cuda.jit
def fills_shared_memory(y: write(int32)):
    shared = cuda.shared.array(10_000, int32)
    shared[cuda.threadIdx.x] = cuda.threadIdx.x
    cuda.syncthreads()
    y[cuda.threadIdx.x] = shared[cuda.threadIdx.x ^ 1]


@pytest.mark.parametrize(
    "kernel, message",
    [
        (Kernel(hoards, threads=32), "local memory: 800 bytes"),
        (Kernel(fills_shared_memory, threads=32, registers=4), "registers, declared 4"),
        (
            Kernel(fills_shared_memory, threads=32, shared_bytes=64_000),
            "104000 bytes of shared memory, 101376 available",
        ),
        (Kernel(fills_shared_memory, threads=32, opcodes=("HMMA",)), "no HMMA in the machine code"),
    ],
)
def test_a_kernel_over_its_budget_would_be_seen(kernel, message, tmp_path):
    wrong, _ = over_budget(kernel, "sm_120", tmp_path)
    assert len(wrong) == 1 and message in wrong[0]


def test_numpy_and_the_compiler_round_alike():
    """Plain arithmetic compiles to operations that round one by one, as numpy's do."""

    @cuda.jit
    def plain(x: read(float32), y: write(float32)):
        y[0] = x[0] * x[1] + x[2] / x[3] - x[4]

    text = Kernel(plain, threads=32).ptx("sm_120")
    assert re.findall(r"(\w+)\.rn\.f32", text) == ["mul", "div", "add", "sub"]
    x = np.arange(1, 6, dtype=np.float32)
    y = np.empty(1, np.float32)
    Kernel(plain, threads=32).launch(1, x, y)
    assert y[0] == x[0] * x[1] + x[2] / x[3] - x[4]
