"""On what operations run: which backend a name means on this machine."""

import ctypes
import importlib
from collections.abc import Callable

from ddtree_numba.model.backend import Backend, NumpyBackend
from ddtree_numba.model.place import machine

BACKENDS = ("auto", "numpy", "cuda")
CUDA_DTYPE = "bfloat16"
MOST_GPUS = 16  # whose sums the kernels take
Note = Callable[[str], None]


def has_driver() -> bool:
    """Whether a machine is worth a try with cuda, before anything of it is imported."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def silent(line: str) -> None:
    pass


def name_of(backend: str, dtype: str, ranks: int = 1, note: Note = silent) -> str:
    """What a backend's name means for a process of so many ranks on this machine.

    `auto` is cuda for one rank, where a GPU is visible, else numpy. Takes no memory of a GPU.
    note(line) says why `auto` is not cuda although there is a driver.
    ValueError, in one line, for a backend that is unknown or cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "auto":
        if ranks > 1 or dtype != CUDA_DTYPE or not has_driver():
            return "numpy"
        try:
            return name_of("cuda", dtype)
        except ValueError as error:
            note(f"{error}; numpy is used instead")
            return "numpy"
    if backend == "cuda":
        if dtype != CUDA_DTYPE:
            raise ValueError(
                f"backend 'cuda' computes in {CUDA_DTYPE}, not in {dtype}: use 'numpy'"
            )
        visible_gpus()
    return backend


def visible_gpus() -> int:
    """How many GPUs there are for cuda; ValueError, in one line, if none can be used."""
    try:
        importlib.import_module("ddtree_numba.model.cuda_backend")  # are its packages there?
        from ddtree_numba.kernels import driver

        return driver.visible()
    except (ImportError, RuntimeError) as error:
        raise refusal(error) from None


def gpu_of(local_rank: int) -> str:
    """Machine and PCI bus id of the GPU that a rank gets: that of its number, or the only one."""
    from ddtree_numba.kernels import driver

    return f"{machine()} {driver.bus_id(local_rank % visible_gpus())}"


def refusal(error: Exception) -> ValueError:
    """Why cuda cannot run: no packages; no device, driver or compiler."""
    missing = isinstance(error, ImportError)
    advice = "; install the extra cu13: pip install '.[cu13]'" if missing else ""
    return ValueError(f"backend 'cuda': {error}{advice}")


def open_backends(
    backend: str, dtype: str, ranks: int = 1, note: Note = silent, device: int | None = None
) -> list[Backend]:
    """One for each rank of this process, all on one device; see `name_of` for arguments and errors.

    `auto` is numpy, too, where the device then fails.
    """
    name = name_of(backend, dtype, ranks, note)
    if name == "numpy":
        return [NumpyBackend(dtype)] * ranks
    from ddtree_numba.model.cuda_backend import CudaBackend

    try:
        return [CudaBackend(device) for _ in range(ranks)]
    except (ImportError, RuntimeError) as error:
        if backend != "auto":
            raise refusal(error) from None
        note(f"{refusal(error)}; numpy is used instead")
        return [NumpyBackend(dtype)] * ranks
