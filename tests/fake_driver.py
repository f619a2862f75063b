"""A made-up CUDA driver: what `kernels/driver.py` calls, with a record of the launches."""

import ctypes
import enum
import struct
from types import SimpleNamespace
from typing import Any

SUCCESS = 0


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class Configuration(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((f"{what}Dim{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_size_t),
        ("attrs", ctypes.POINTER(Attribute)),
        ("numAttrs", ctypes.c_uint),
    ]


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
        prefix = "CU_FUNC_ATTRIBUTE_"
        kinds = "MAX_DYNAMIC_SHARED_SIZE_BYTES", "PREFERRED_SHARED_MEMORY_CARVEOUT"
        self.CUfunction_attribute = SimpleNamespace(**{prefix + n: prefix + n for n in kinds})
        serial = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        self.CUlaunchAttributeID = SimpleNamespace(**{serial: 6})
        self.CUresult = CUresult
        self.allowed: dict = {}
        self.divided: dict = {}
        self.functions: list[str] = []
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
        kept = self.divided if name.endswith("CARVEOUT") else self.allowed
        kept[self.functions[function]] = value
        return (SUCCESS,)

    def load_function(self, compiled):
        self.functions.append(compiled.name)
        return None, len(self.functions) - 1

    def cuLaunchKernelEx(self, configuration, function, parameters, extra) -> int:
        """Four addresses; the configuration is copied, as the driver does."""
        given = Configuration.from_buffer_copy(ctypes.string_at(configuration, 56))
        self.launches.append((given, self.functions[function.value or 0], parameters.value))
        return self.status


def unpacked(parameters: int, codes: str) -> list[Any]:
    """What a device would read: one value behind each of the pointers."""
    places = (ctypes.c_void_p * len(codes)).from_address(parameters)
    sizes = [struct.calcsize(code) for code in codes]
    data = [ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=True)]
    return [struct.unpack(code, each)[0] for code, each in zip(codes, data, strict=True)]
