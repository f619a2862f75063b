"""The roofs, measured in the run that uses them, and the costs of launching, apart.

copy: a device-to-device copy, bytes read plus bytes written, outside of a graph: a copy captured in
a graph becomes a memcpy node and reaches two thirds of it on an H200. mma: a large bfloat16 product
of random numbers by a library, with the card's best instructions; zeros run faster. mma_sync: the
instruction that kernels here have, operands in registers, nothing else. step: what an empty kernel
adds to a captured sequence; every measured time holds it once a kernel. launch: host time of one
launch with ten arguments.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numba import cuda, float32, int32, uint32

from bench.device import Gpu
from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.launch import kernel
from ddtree_numba.kernels.tensor_cores import multiply
from ddtree_numba.spec.numerics import BF16

COPY_BYTES = 2 << 30  # of each buffer: what stays in L2 unwritten is 1-2 %
SIDE = 8192  # of the square product
LAUNCHES = 500  # fewer than the driver queues before it blocks
CHAINS, PRODUCTS = 16, 1 << 12  # of mma in a warp, side by side; products of each chain
SUMS = 4 * CHAINS  # of a lane
MMA_WARPS, MMA_BLOCKS = 8, 2  # of a block, and of a multiprocessor
MMA_FLOPS = 2 * 16 * 8 * 16


@dataclass(frozen=True)
class Roofs:
    """In SI units: bytes and operations a second, seconds."""

    copy: float
    mma: float | None  # None where no library multiplied bfloat16
    mma_by: str  # which one did, or why none
    mma_sync: float
    step: float
    launch: float


@kernel(threads=32)
@cuda.jit
def empty_kernel(
    a: read(float32),
    b: read(float32),
    c: read(float32),
    d: read(float32),
    out: write(float32),
    i: int32,
    j: int32,
    k: int32,
    n: int32,
    scale: float32,
):
    return


# 128 registers: MMA_BLOCKS fit beside each other.
@kernel(threads=32 * MMA_WARPS, registers=128, opcodes=("HMMA.16816.F32.BF16",))
@cuda.jit
def mma_kernel(operands: read(uint32), out: write(float32), products: int32):
    """out[thread] = the sums of its chains; operands[6, 32]: a lane's words of both matrices."""
    lane = cuda.threadIdx.x & 31
    a = cuda.local.array(6, uint32)
    for i in range(6):
        a[i] = operands[32 * i + lane]
    sums = cuda.local.array(SUMS, float32)
    for i in range(SUMS):
        sums[i] = float32(0)
    for _ in range(products):
        for n in range(0, SUMS, 4):
            multiply(sums, n, a[0], a[1], a[2], a[3], a[4], a[5])
    total = float32(0)
    for i in range(SUMS):
        total = ptx.add(total, sums[i])
    out[cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x] = total


def measure(gpu: Gpu) -> Roofs:
    mma, by = mma_rate(gpu)  # first: it brings the clocks up
    empty = _empty_launch(gpu)
    empty(gpu.stream)  # loads it
    step, launch = graph_step(gpu, empty), host_launch(gpu, empty)
    return Roofs(copy_rate(gpu), mma, by, mma_sync_rate(gpu), step, launch)


def copy_rate(gpu: Gpu) -> float:
    source = gpu.array(random_bf16(COPY_BYTES // 2))
    target = gpu.copy(source)
    seconds = gpu.median_seconds(
        lambda: target.data.copy_from_device_async(source.data, COPY_BYTES, gpu.stream)
    )
    return 2 * COPY_BYTES / seconds


def mma_rate(gpu: Gpu) -> tuple[float | None, str]:
    """Of cuBLAS through CuPy, else of PyTorch."""
    reasons = []
    for name, product in (("cuBLAS through CuPy", _cublas), ("PyTorch", _torch)):
        try:
            return 2 * SIDE**3 / gpu.median_seconds(product(gpu)), name
        except Exception as error:  # libraries that are absent or of another build raise anything
            reasons.append(f"{name}: {' '.join(str(error).split())[:120]}")
    return None, "; ".join(reasons)


def mma_sync_rate(gpu: Gpu) -> float:
    blocks = MMA_BLOCKS * gpu.properties["multiProcessorCount"]
    operands = gpu.array(random_bf16(2 * 6 * 32).view(np.uint32))
    out = gpu.poisoned(np.empty(blocks * mma_kernel.threads, np.float32))
    seconds = gpu.median_seconds(
        lambda: mma_kernel.launch(blocks, operands, out, PRODUCTS, stream=gpu.stream)
    )
    return blocks * MMA_WARPS * CHAINS * PRODUCTS * MMA_FLOPS / seconds


def graph_step(gpu: Gpu, empty: Callable[[Any], None]) -> float:
    replay = gpu.capture(lambda stream: [empty(stream) for _ in range(LAUNCHES)])
    return gpu.median_seconds(replay) / LAUNCHES


def host_launch(gpu: Gpu, empty: Callable[[Any], None]) -> float:
    times = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            empty(gpu.stream)
        times.append((time.perf_counter() - start) / LAUNCHES)
        gpu.stream.synchronize()
    return median(times)


def random_bf16(count: int) -> np.ndarray:
    """A million random numbers, over and over."""
    some = np.random.default_rng(1).standard_normal(1 << 20).astype(BF16)
    return np.resize(some, count)


def _empty_launch(gpu: Gpu) -> Callable[[Any], None]:
    x = gpu.array(np.zeros(1, np.float32))
    return lambda stream: empty_kernel.launch(1, x, x, x, x, x, 1, 2, 3, 4, 1.0, stream=stream)


def _cublas(gpu: Gpu) -> Callable[[], None]:
    from cupy.cuda import cublas, device, runtime

    a = gpu.array(random_bf16(SIDE * SIDE))
    b, out = gpu.copy(a), gpu.copy(a)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    with gpu.stream:
        handle = device.get_cublas_handle()
    kind, n = runtime.CUDA_R_16BF, SIDE

    def product() -> None:  # column-major or row-major: the work is the same
        cublas.gemmEx(
            *(handle, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N, n, n, n),
            *(one.ctypes.data, a.data.ptr, kind, n, b.data.ptr, kind, n),
            *(zero.ctypes.data, out.data.ptr, kind, n),
            *(cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT_TENSOR_OP),
        )

    return product


def _torch(gpu: Gpu) -> Callable[[], None]:
    import torch

    a, b = torch.randn(2, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    stream = torch.cuda.ExternalStream(gpu.stream.ptr)

    def product() -> None:
        with torch.cuda.stream(stream):
            torch.matmul(a, b, out=out)

    return product
