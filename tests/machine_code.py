"""What the assembler made of a kernel."""

import subprocess
from pathlib import Path

from cuda.pathfinder import find_nvidia_binary_utility

from ddtree_numba.kernels.launch import Kernel


def disassembled(cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = find_nvidia_binary_utility("nvdisasm")
    assert tool, "nvdisasm is missing; the extra `test` installs it"
    return subprocess.run(
        [tool, "-ndf", "-c", path], check=True, capture_output=True, text=True
    ).stdout


def before_the_wait(kernel: Kernel, folder: Path) -> str:
    """The code for sm_90 ahead of the one wait for the kernel before."""
    before, _ = disassembled(kernel.compile("sm_90").cubin, folder).split("ACQBULK")
    return before
