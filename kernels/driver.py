"""The CUDA driver as launches need it: is there a usable device, load a cubin, launch it packed.

Errors are one line and say what to change. The driver is looked up through `api()` and
`launch_function()`, so that tests put a made-up device in its place.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ddtree_numba.kernels.compile import Compiled, versions

OLDEST_DRIVER = 13000  # CUDA 13.0: the PTX and cubins that we make
OLDEST_ARCH = (9, 0)  # arithmetic of bfloat16 pairs, dependent launch
# CUlaunchConfig of cuda.h: grid, block, shared bytes; stream, attributes; how many attributes.
CONFIGURATION = "7InnI4x"
ATTRIBUTE = "I4xi60x"  # CUlaunchAttribute: what, value


class DeviceError(RuntimeError):
    """No device, driver or memory that can run the kernels."""


def api() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def launch_function() -> Callable:
    """cuLaunchKernelEx itself: the bindings' takes objects, whose making costs a microsecond."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


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
def require_driver() -> int:
    """A driver that is new enough -> how many devices are visible, one at least."""
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
    return count


def current_device() -> int:
    """CuPy's, with a context."""
    require_driver()
    import cupy

    cupy.cuda.runtime.free(0)  # makes the context, where nothing has yet
    return cupy.cuda.Device().id


@cache
def _current_stream() -> Callable:
    import cupy

    return cupy.cuda.get_current_stream


def address_of(stream: Any) -> int:
    """Of a CuPy stream, or of CuPy's current one."""
    if stream is None:
        stream = _current_stream()()
    return stream if isinstance(stream, int) else stream.ptr


def attribute(device: int, name: str) -> int:
    kinds = api().CUdevice_attribute
    kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
    return call("cuDeviceGetAttribute", kind, call("cuDeviceGet", device))


def bus_id(device: int) -> str:
    """Of a device on the PCI bus; takes no memory of it."""
    require_driver()
    text = call("cuDeviceGetPCIBusId", 32, call("cuDeviceGet", device))
    return text.split(b"\0")[0].decode()


def over_nvlink(device: int, bus_id: str) -> bool:
    """Is the GPU of that PCI bus id this one, or one that it reaches by more than PCIe?

    Native atomics between two GPUs need NVLink. False where the other one is not visible.
    """
    try:
        other = call("cuDeviceGetByPCIBusId", bus_id.encode())
        own = call("cuDeviceGet", device)
        if int(own) == int(other):
            return True
        kind = api().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(call("cuDeviceGetP2PAttribute", kind, own, other))
    except DeviceError:
        return False


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


def visible() -> int:
    """How many devices there are, the first of which can run the kernels; takes no memory of it."""
    count = require_driver()
    arch_of(0)
    return count


def launch_error(name: str, status: int, grid: Any) -> DeviceError:
    return DeviceError(f"{name}: launch failed, {api().CUresult(status).name}, grid {grid}")


def blocks_that_fit(block: int, multiprocessor: int) -> int:
    """By shared memory, in bytes: of a block, of a multiprocessor."""
    return multiprocessor // (block + RESERVED)


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


RESERVED = 1024  # bytes of shared memory that the system takes for each block
DIVISION = 65  # percent of L1 that is shared memory: loads under way need the rest
POINTER = "n"  # code of an argument that is an array on the device, or None; "n" packs fastest
# What a launch runs, made for each kernel: no loop, one call that writes configuration and
# arguments, one call of the driver, which copies them. A launch has a place of its own meanwhile,
# since another thread may come between.
START = """
def start(grid, arguments, stream):
    x, y, z = (grid, 1, 1) if type(grid) is int else three(grid)
    if not (x and y and z):
        return 0
    if type(stream) is not int:
        stream = address_of(stream)
    [{names}] = arguments
    try:
        place = take()
    except IndexError:
        place = another()
    buffer, configuration, parameters = place
    pack(buffer, 0, x, y, z, {threads}, 1, 1, {shared}, stream, {attributes}, {values})
    status = launch(configuration, function, parameters, nothing)
    give_back(place)
    return status
"""


def three(grid: int | tuple[int, ...]) -> tuple[int, ...]:
    """Blocks along x, y, z."""
    return (*(grid if isinstance(grid, tuple) else (int(grid),)), 1, 1)[:3]


class Loaded:
    """A kernel on the device. `start(grid, arguments, stream)` launches it: 0, or an error."""

    def __init__(
        self, kernel: Compiled, codes: Sequence[str], threads: int, shared: int = 0, pdl=False
    ):
        self.kernel, self.codes, self.shared = kernel, codes, shared
        self.code, self.function = load_function(kernel)
        self.layout = struct.Struct(CONFIGURATION + "".join(codes))
        self.attribute = serial_attribute() if pdl else None
        self.start = self._starter(threads)

    def _place(self) -> tuple:
        """Memory for one launch: the configuration, then the arguments; addresses of both."""
        buffer = ctypes.create_string_buffer(self.layout.size)
        first, places = ctypes.addressof(buffer), []
        for i, code in enumerate(self.codes):
            end = struct.calcsize(CONFIGURATION + "".join(self.codes[: i + 1]))
            places.append(first + end - struct.calcsize(code))
        addresses = (ctypes.c_void_p * max(len(places), 1))(*places)
        parameters = ctypes.c_void_p(ctypes.addressof(addresses))
        parameters.keep = addresses  # type: ignore[attr-defined]
        return buffer, ctypes.c_void_p(first), parameters

    def _starter(self, threads: int) -> Callable[..., int]:
        names = [f"a{i}" for i in range(len(self.codes))]
        address = "0 if {0} is None else {0}.data.ptr"
        values = [
            address.format(name) if code == POINTER else name
            for name, code in zip(names, self.codes, strict=True)
        ]
        attributes = "0, 0" if self.attribute is None else f"{ctypes.addressof(self.attribute)}, 1"
        text = START.format(
            names=", ".join(names),
            values=", ".join(values),
            threads=threads,
            shared=self.shared,
            attributes=attributes,
        )
        places = [self._place()]
        known: dict[str, Any] = dict(
            three=three,
            address_of=address_of,
            take=places.pop,
            give_back=places.append,
            another=self._place,
            pack=self.layout.pack_into,
            launch=launch_function(),
            function=ctypes.c_void_p(int(self.function)),
            nothing=ctypes.c_void_p(),
        )
        exec(text, known)
        return known["start"]

    def allow_shared(self, device: int) -> None:
        """Whatever the amount: the limit without opting in is no round number (static arrays).

        All kernels ask for the same division of L1 and shared memory: a multiprocessor changes it
        only when it has drained, so the next kernel could not start beside the one before.
        """
        limit = attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        require_shared(self.kernel, self.shared, limit)
        kinds = api().CUfunction_attribute
        kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", self.function, kind, self.shared)
        kind = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        call("cuFuncSetAttribute", self.function, kind, DIVISION)


def serial_attribute() -> ctypes.Array:
    """Programmatic dependent launch: may start before the kernel ahead of it has ended."""
    kinds = api().CUlaunchAttributeID
    kind = int(kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    return ctypes.create_string_buffer(struct.pack(ATTRIBUTE, kind, 1))
