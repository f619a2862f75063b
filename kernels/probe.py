"""Is the device of use? One small kernel, compiled, launched and checked before any large work."""

import numpy as np
from numba import cuda, int32

from ddtree_numba.kernels import driver
from ddtree_numba.kernels.arguments import write
from ddtree_numba.kernels.launch import kernel

THREADS = 32


@kernel(threads=THREADS)
@cuda.jit
def squares(y: write(int32)):
    y[cuda.threadIdx.x] = cuda.threadIdx.x * cuda.threadIdx.x


def check_device() -> str:
    """One line on device, driver and compilers; DeviceError or CompileError says what to change."""
    device = driver.current_device()
    arch = driver.arch_of(device)
    import cupy

    out = cupy.empty(THREADS, np.int32)
    squares.launch(1, out)
    if not np.array_equal(out.get(), np.arange(THREADS) ** 2):
        raise driver.DeviceError(f"device {device} ({arch}) computes wrong results")
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return f"{name} ({arch}), {driver.toolchain()}"
