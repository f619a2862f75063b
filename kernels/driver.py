"""The CUDA driver as launches need it: is there a usable device, load a cubin, launch it packed.

Errors are one line and say what to change. The driver's module is looked up through `api()`, so
that tests put a made-up device in its place.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from ddtree_numba.kernels.compile import Compiled, versions

OLDEST_DRIVER = 13000  # CUDA 13.0: the PTX and cubins that we make
OLDEST_ARCH = (8, 0)  # mma.sync with bfloat16, cp.async
KEPT_CONFIGURATIONS = 256


class DeviceError(RuntimeError):
    """No device, driver or memory that can run the kernels."""


def api() -> Any:
    from cuda.bindings import driver

    return driver


def call(name: str, *arguments: Any) -> Any:
    """The result of a driver function, or a DeviceError with its name and the driver's words."""
    status, *results = getattr(api(), name)(*arguments)
    if int(status):
        raise DeviceError(f"{name}: {getattr(status, 'name', status)}")
    return results[0] if len(results) == 1 else tuple(results) or None


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def toolchain() -> str:
    """Versions of the driver's CUDA and of the compilers."""
    names = ("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")
    used = ", ".join(f"{name} {versions()[name]}" for name in names)
    return f"driver of CUDA {_dotted(call('cuDriverGetVersion'))}, {used}"


@cache
def require_driver() -> None:
    """A driver that is new enough, and at least one device."""
    try:
        version = call("cuDriverGetVersion")
    except (RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise DeviceError(f"no NVIDIA driver found ({reason}); backend numpy needs none") from error
    if version < OLDEST_DRIVER:
        raise DeviceError(
            f"the NVIDIA driver is too old, the kernels need one of CUDA {_dotted(OLDEST_DRIVER)} "
            f"({toolchain()}): update it to release 580 or newer"
        )
    try:
        call("cuInit", 0)
        count = call("cuDeviceGetCount")
    except DeviceError as error:
        raise DeviceError(f"no usable NVIDIA device ({error}); check nvidia-smi") from error
    if count < 1:
        raise DeviceError("no NVIDIA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES")


def current_device() -> int:
    """CuPy's, with a context."""
    require_driver()
    import cupy

    cupy.cuda.runtime.free(0)  # makes the context, where nothing has yet
    return cupy.cuda.Device().id


def address_of(stream: Any) -> int:
    """Of a CuPy stream, or of CuPy's current one."""
    if stream is None:
        import cupy

        stream = cupy.cuda.get_current_stream()
    return stream if isinstance(stream, int) else stream.ptr


def attribute(device: int, name: str) -> int:
    kinds = api().CUdevice_attribute
    kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
    return call("cuDeviceGetAttribute", kind, call("cuDeviceGet", device))


@cache
def arch_of(device: int) -> str:
    """sm_120, for example; refuses devices that lack the instructions."""
    require_driver()
    try:
        major = attribute(device, "COMPUTE_CAPABILITY_MAJOR")
        minor = attribute(device, "COMPUTE_CAPABILITY_MINOR")
    except DeviceError as error:
        raise DeviceError(f"device {device} cannot be used: {error}") from error
    if (major, minor) < OLDEST_ARCH:
        oldest = "".join(map(str, OLDEST_ARCH))
        raise DeviceError(
            f"device {device} is sm_{major}{minor}, the kernels need sm_{oldest} or newer"
        )
    return f"sm_{major}{minor}"


def require_shared(kernel: Compiled, dynamic: int, limit: int) -> None:
    """`limit` is the device's opt-in limit of a block; static arrays count too."""
    available = limit - kernel.shared_bytes
    if dynamic > available:
        raise DeviceError(
            f"{kernel.name}: {dynamic} bytes of dynamic shared memory requested, {available} "
            f"available (device limit {limit}, static {kernel.shared_bytes})"
        )


def load_function(kernel: Compiled) -> tuple[Any, Any]:
    """The loaded code, to keep alive, and the kernel's handle in the current context."""
    from cuda.core import ObjectCode

    code = ObjectCode.from_cubin(kernel.cubin)
    return code, call("cuKernelGetFunction", code.get_kernel(kernel.name).handle)


class Loaded:
    """A kernel on the device: packs arguments and launches, in a few microseconds.

    The driver copies the packed arguments during the call, so that one buffer serves all launches;
    the lock keeps a second thread from filling it meanwhile.
    """

    def __init__(
        self, kernel: Compiled, codes: Sequence[str], threads: int, shared: int = 0, pdl=False
    ):
        self.kernel, self.threads, self.shared, self.pdl = kernel, threads, shared, pdl
        self.code, self.function = load_function(kernel)
        self.start = api().cuLaunchKernelEx
        packing = struct.Struct("=" + "".join(codes))
        self.pack = packing.pack_into
        self.buffer = ctypes.create_string_buffer(max(packing.size, 1))
        first = ctypes.addressof(self.buffer)
        places = [first + struct.calcsize("=" + "".join(codes[:i])) for i in range(len(codes))]
        self.places = (ctypes.c_void_p * max(len(codes), 1))(*places)
        self.parameters = ctypes.addressof(self.places)
        self.configurations: dict[tuple, Any] = {}
        self.lock = threading.Lock()

    def allow_shared(self, device: int) -> None:
        """Whatever the amount: the limit without opting in is no round number (static arrays)."""
        limit = attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        require_shared(self.kernel, self.shared, limit)
        kinds = api().CUfunction_attribute
        kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", self.function, kind, self.shared)

    def launch(self, grid: tuple[int, int, int], values: list, stream: int) -> None:
        with self.lock:
            configuration = self.configurations.get((grid, stream))
            if configuration is None:
                configuration = self._configure(grid, stream)
            self.pack(self.buffer, 0, *values)
            (status,) = self.start(configuration, self.function, self.parameters, 0)
        if status:
            raise DeviceError(f"{self.kernel.name}: launch failed, {status.name}, grid {grid}")

    def _configure(self, grid: tuple[int, int, int], stream: int) -> Any:
        driver = api()
        made = driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = grid
        made.blockDimX, made.blockDimY, made.blockDimZ = self.threads, 1, 1
        made.sharedMemBytes, made.hStream = self.shared, driver.CUstream(stream)
        if self.pdl:
            entry = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            entry.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            entry.value.programmaticStreamSerializationAllowed = 1
            made.attrs, made.numAttrs = [entry], 1
        if len(self.configurations) >= KEPT_CONFIGURATIONS:
            self.configurations.clear()
        self.configurations[grid, stream] = made
        return made
