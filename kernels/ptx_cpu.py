"""What the memory and warp instructions of `ptx.py` do on the CPU executor: the same names."""

import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.kernels.ptx_cpu_arithmetic import M32, M64, single
from ddtree_numba.kernels.simt_memory import Pointer
from ddtree_numba.kernels.simt_shared import SharedArray
from ddtree_numba.kernels.simt_threads import (
    WARP,
    Fault,
    barrier,
    look_again,
    meet,
    now,
)

M16 = 0xFFFF


# --- addresses


def at(x: Pointer | SharedArray, index: int) -> Pointer:
    if not isinstance(x, Pointer):
        raise Fault("at: not a pointer to global memory")
    return x.at(index)


def shared_address(array: SharedArray) -> int:
    return array.start


def _single_or_tuple(values: tuple, floats: bool) -> Any:
    if floats:
        values = tuple(map(np.float32, values))
    return values[0] if len(values) == 1 else values


def _loader(code: str, shared: bool = False, poll: bool = False) -> Callable:
    form, floats = struct.Struct(f"<{code}"), "f" in code

    def load_global(x: Pointer, index: int) -> Any:
        if poll:
            look_again()
        return _single_or_tuple(form.unpack(x.memory.load(x.byte(index), form.size)), floats)

    def load_shared(address: int) -> Any:
        data = now.block.shared.load(int(address), form.size)
        return _single_or_tuple(form.unpack(data), floats)

    return load_shared if shared else load_global


def _packed(form: struct.Struct, values: tuple, mask: int) -> bytes:
    if mask:
        return form.pack(*(int(value) & mask for value in values))
    return form.pack(*map(single, values))


def _storer(code: str, shared: bool = False) -> Callable:
    form = struct.Struct(f"<{code}")
    mask = {"I": M32, "H": M16, "f": 0}[code[-1]]

    def store_global(x: Pointer, index: int, *values: Any) -> None:
        x.memory.store(x.byte(index), _packed(form, values, mask))

    def store_shared(address: int, *values: Any) -> None:
        now.block.shared.store(int(address), _packed(form, values, mask))

    return store_shared if shared else store_global


# --- global memory

ldg1, ldg2, ldg4 = _loader("I"), _loader("2I"), _loader("4I")
ldg2_f, ldg4_f = _loader("2f"), _loader("4f")
ldg4_once = ldg4
stg1, stg2, stg4 = _storer("I"), _storer("2I"), _storer("4I")
stg4_f = _storer("4f")
ld_volatile, ld_volatile4 = _loader("I", poll=True), _loader("4I", poll=True)
ld_acquire = ld_acquire_sys = ld_volatile
st_volatile = st_release = stg1
st_volatile4 = stg4


def prefetch_l2(x: Pointer, index: int) -> None:
    x.memory.check(x.byte(index), 1)


def _atomic(update: Callable, code: str = "I") -> Callable:
    form, mask = struct.Struct(f"<{code}"), {"I": M32, "Q": M64}[code]

    def change(x: Pointer, index: int, *values: int) -> int:
        (old,) = form.unpack(x.memory.load(x.byte(index), form.size))
        new = update(old, *(int(value) & mask for value in values))
        x.memory.store(x.byte(index), form.pack(new & mask))
        return old

    return change


atom_add = _atomic(lambda old, v: old + v)
atom_add_acq_rel = red_add_u64 = _atomic(lambda old, v: old + v, "Q")
red_max_u64 = _atomic(max, "Q")
atom_cas = _atomic(lambda old, expected, v: v if old == expected else old)

# --- shared memory

lds2, lds4 = _loader("2I", shared=True), _loader("4I", shared=True)
lds1_f, lds2_f, lds4_f = (_loader(code, shared=True) for code in ("f", "2f", "4f"))
sts1 = _storer("I", shared=True)
sts1_f, sts2_f, sts4_f = (_storer(code, shared=True) for code in ("f", "2f", "4f"))
sts1_h = _storer("H", shared=True)


def _matrices(count: int, transposed: bool) -> Callable:
    """Lane 8 i + r gives row r of matrix i; lane 4 g + t gets elements 2t, 2t + 1 of row g."""

    def combine(rows: list) -> list:
        data = b"".join(rows[: 8 * count])
        matrices = np.frombuffer(data, np.uint16).reshape(count, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.swapaxes(1, 2))
        return [tuple(lane) for lane in matrices.view(np.uint32).reshape(count, WARP).T.tolist()]

    def ldmatrix(address: int) -> tuple:
        row = b""
        if now.thread.lane < 8 * count:
            row = now.block.shared.load(int(address), 16)
        return meet(combine, row)

    return ldmatrix


ldmatrix2, ldmatrix4 = _matrices(2, False), _matrices(4, False)
ldmatrix4_t = _matrices(4, True)


# --- tensor cores


def _fragments() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where A[16, 16] and B[16, 8] lie in 32 lanes of 12 halves, and each lane's 4 values in D."""
    a, b, d = np.empty((16, 16), int), np.empty((16, 8), int), np.empty((WARP, 4), int)
    for lane in range(WARP):
        group, quad = lane >> 2, lane & 3
        for half in range(2):
            for r in range(4):
                a[group + 8 * (r & 1), 2 * quad + half + 8 * (r >> 1)] = 12 * lane + 2 * r + half
            for r in range(2):
                b[2 * quad + half + 8 * r, group] = 12 * lane + 8 + 2 * r + half
                d[lane, 2 * r + half] = 8 * (group + 8 * r) + 2 * quad + half
    return a, b, d


A, B, D = _fragments()


def _mma(given: list) -> list:
    """Sums in float64, rounded once: close to the hardware's, not its bits."""
    words = np.array([lane[:6] for lane in given], np.int64).astype(np.uint32)
    halves = (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    halves = halves.astype(np.float64).reshape(-1)
    # a column's bits come from that column alone, which BLAS does not promise
    product = (halves[A][:, :, None] * halves[B]).sum(1).reshape(-1)
    total = product[D] + np.array([lane[6:] for lane in given])
    return list(map(tuple, total.astype(np.float32)))


def mma(*registers: Any) -> tuple:
    for value in registers[6:]:
        single(value)
    return meet(_mma, registers)


# --- warps


def _bits32(value):
    return int(value) & M32


def _shfl_xor(given):
    return [given[lane ^ (given[lane][1] & 31)][0] for lane in range(WARP)]


def _shfl_up(given):
    source = (lane - (given[lane][1] & 31) for lane in range(WARP))
    return [given[j if j >= 0 else lane][0] for lane, j in enumerate(source)]


def _shfl_idx(given):
    return [given[given[lane][1] & 31][0] for lane in range(WARP)]


def _redux_add(given):
    return [sum(given) & M32] * WARP


def _redux_max(given):
    return [max(given)] * WARP


def _redux_min(given):
    return [min(given)] * WARP


def shfl_xor(value, mask):
    return meet(_shfl_xor, (_bits32(value), int(mask)))


def shfl_up(value, delta):
    return meet(_shfl_up, (_bits32(value), int(delta)))


def shfl_idx(value, lane):
    return meet(_shfl_idx, (_bits32(value), int(lane)))


def shfl_xor_f(value, mask):
    return meet(_shfl_xor, (single(value), int(mask)))


def redux_add(value):
    return meet(_redux_add, _bits32(value))


def redux_max(value):
    return meet(_redux_max, _bits32(value))


def redux_min(value):
    return meet(_redux_min, _bits32(value))


def globaltimer() -> int:
    return time.monotonic_ns()


def bar_sync(number, count):
    barrier(int(number), int(count))


# Kernels run one after another here; `simt_launches.py` looks at what could overlap.


def wait_for_previous() -> None:
    now.thread.waited = now.block.launch.waited = True


def launch_next() -> None:
    if not now.thread.waited:
        now.block.launch.early = True


def fence_sys() -> None:
    pass
