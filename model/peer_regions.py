"""Memory that other processes can open: of the device, or of the host where GPUs reach no others.

A region of the device comes from the driver and never from CuPy's pool: an IPC handle names the
whole allocation, so that two arrays of a pool have one handle. Its size is a multiple of 2 MiB,
below which the driver lets allocations share as well. A region of the host is an anonymous file
that peers open through /proc: it needs no name and leaves nothing behind.
"""

import mmap
import os
from typing import Any

import numpy as np

from ddtree_numba.kernels.driver import DeviceError

GRANULE = 2 << 20
PORTABLE_MAPPED = 3  # cudaHostRegister: for every context, with an address on the device


class DeviceRegion:
    """Zeroed memory of the current device."""

    def __init__(self, size: int) -> None:
        from cupy.cuda import runtime

        self.runtime = runtime
        self.size = -(-size // GRANULE) * GRANULE
        self.address = runtime.malloc(self.size)
        runtime.memset(self.address, 0, self.size)
        self.opened: list[int] = []

    def handle(self) -> bytes:
        """What a process needs to open it."""
        return self.runtime.ipcGetMemHandle(self.address)

    def open(self, handle: bytes) -> int:
        """Address of another process's region; DeviceError where the devices do not allow it."""
        try:
            self.opened.append(self.runtime.ipcOpenMemHandle(handle))
        except self.runtime.CUDARuntimeError as error:
            raise DeviceError(f"device memory of another process: {error}") from error
        return self.opened[-1]

    def close(self) -> None:
        for address in self.opened:
            self.runtime.ipcCloseMemHandle(address)
        self.opened = []
        if self.address:
            self.runtime.free(self.address)
            self.address = 0


class HostRegion:
    """Zeroed memory of the host, at the same address on the device."""

    def __init__(self, size: int) -> None:
        from cupy.cuda import runtime

        self.runtime = runtime
        self.size = -(-size // GRANULE) * GRANULE
        self.file = os.memfd_create("ddtree_numba")
        os.ftruncate(self.file, self.size)
        self.maps: list[tuple[mmap.mmap, int]] = []
        self.address = self._map(self.file, self.size)

    def _map(self, file: int, size: int) -> int:
        memory = mmap.mmap(file, size)
        address: Any = np.frombuffer(memory, np.uint8).ctypes.data
        try:
            self.runtime.hostRegister(address, size, PORTABLE_MAPPED)
        except self.runtime.CUDARuntimeError as error:
            raise DeviceError(f"host memory of {size} bytes: {error}") from error
        self.maps.append((memory, address))
        return address

    def handle(self) -> bytes:
        return f"{os.getpid()} {self.file} {self.size}".encode()

    def open(self, handle: bytes) -> int:
        process, file, size = map(int, handle.split())
        try:
            opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        except OSError as error:
            raise DeviceError(f"host memory of process {process}: {error}") from error
        try:
            return self._map(opened, size)
        finally:
            os.close(opened)

    def close(self) -> None:
        for _, address in self.maps:
            self.runtime.hostUnregister(address)
        self.maps = []  # unmapped with the last reference
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


REGIONS: dict[str, Any] = {"device": DeviceRegion, "host": HostRegion}
