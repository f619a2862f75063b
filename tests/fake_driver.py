"""A made-up CUDA driver: what `kernels/driver.py` calls, with a record of the launches."""

import ctypes
import struct
from types import SimpleNamespace

SUCCESS = 0


class Status(int):
    name = "CUDA_ERROR_INVALID_VALUE"


class FakeDriver:
    """`version`, `count` and `attributes` describe the machine; `launches` is what it was asked."""

    def __init__(self, version=13000, count=1, arch=(12, 0), optin=101_376, missing=False):
        self.version, self.count, self.missing = version, count, missing
        self.attributes = {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": arch[0],
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": arch[1],
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": optin,
        }
        self.CUdevice_attribute = SimpleNamespace(**{name: name for name in self.attributes})
        shared = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        self.CUfunction_attribute = SimpleNamespace(**{shared: shared})
        serial = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        self.CUlaunchAttributeID = SimpleNamespace(**{serial: serial})
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = lambda: SimpleNamespace(id=None, value=SimpleNamespace())
        self.CUstream = int
        self.allowed: dict = {}
        self.launches: list = []
        self.status = SUCCESS

    def cuDriverGetVersion(self):
        if self.missing:
            raise RuntimeError('"cuda" is an NVIDIA driver library')
        return SUCCESS, self.version

    def cuInit(self, flags):
        return (SUCCESS,) if self.count >= 0 else (Status(100),)

    def cuDeviceGetCount(self):
        return SUCCESS, self.count

    def cuDeviceGet(self, ordinal):
        return SUCCESS, ordinal

    def cuDeviceGetAttribute(self, name, device):
        return SUCCESS, self.attributes[name]

    def cuFuncSetAttribute(self, function, name, value):
        self.allowed[function] = value
        return (SUCCESS,)

    def cuLaunchKernelEx(self, configuration, function, parameters, extra):
        self.launches.append((configuration, function, parameters))
        return (self.status,)


def unpacked(parameters: int, codes: str) -> list:
    """What a device would read: one value behind each of the pointers."""
    places = (ctypes.c_void_p * len(codes)).from_address(parameters)
    sizes = [struct.calcsize("=" + code) for code in codes]
    data = [ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=True)]
    return [struct.unpack("=" + code, each)[0] for code, each in zip(codes, data, strict=True)]
