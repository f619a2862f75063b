"""Arrays of one GPU: a stream, a memory pool, and what is done with arrays beside the operations.

Calls follow each other on the stream, so a result's memory is free for later calls as soon as
nobody holds it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import numpy as np

from ddtree_numba.kernels.driver import require_driver
from ddtree_numba.kernels.probe import check_device
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.spec.numerics import BF16

Array = Any  # cupy.ndarray
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


class CudaArrays:
    """Memory of the current device; activations and cache are bfloat16."""

    dtype = BF16
    _nvtx: Any = None

    def __init__(self, index: int | None = None) -> None:
        """On a rank's device, which becomes the current one: that number, or the only one."""
        import cupy

        if index is not None:
            visible = require_driver()
            cupy.cuda.Device(index % visible).use()
        self.device, self.index = check_device(), cupy.cuda.Device().id
        self.xp = cupy
        self._nvtx = _profiler_ranges()
        self.stream, self.side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self._beside: Any = None  # where the side stream stands, if the stream must wait for it
        self.pool = cupy.cuda.MemoryPool()
        self._active = False
        self._workspaces: dict[tuple, list[Array]] = {}
        self._constants: dict[tuple, Array] = {}

    @property
    def bus_id(self) -> str:
        """Of the device on the PCI bus."""
        return self.xp.cuda.Device(self.index).pci_bus_id

    @contextmanager
    def active(self, pool: Any = None) -> Iterator[None]:
        """Stream and memory of what runs inside; within another one, that one's."""
        if self._active:
            yield
            return
        self._active = True
        try:
            with self.stream, self.xp.cuda.using_allocator((pool or self.pool).malloc):
                yield
        finally:
            self._active = False
            self._beside = None  # of a call that failed

    def array(self, host: Any) -> Array:
        """A host array on the device; one that is there already as it is."""
        if isinstance(host, np.ndarray):
            with self.active():
                return self.xp.asarray(np.ascontiguousarray(host))
        return host

    def host(self, array: Array) -> np.ndarray:
        """An array as numpy's, once everything before is done."""
        return array.get(stream=self.stream) if isinstance(array, self.xp.ndarray) else array

    def placed(self, batch: VerifyInput) -> VerifyInput:
        """A batch on the device."""
        given = {each.name: self.array(getattr(batch, each.name)) for each in fields(batch)}
        return replace(batch, **given)  # what is cached beside the fields stays behind

    def empty(self, shape: tuple[int, ...], dtype: Any = BF16) -> Array:
        return self.xp.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Cache rows."""
        with self.active():
            return self.xp.zeros(shape, np.uint16).view(BF16)

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        return self.xp.full(shape, value, np.int32)

    def new_pool(self) -> Any:
        """A memory pool for `active` and graphs: short of memory, it gives back none.

        What is free for other calls is still what captured graphs write to.
        """
        cuda, kept = self.xp.cuda, []

        def allocate(size: int) -> Any:
            kept.append(cuda.MemoryPointer(cuda.Memory(size), 0))
            return kept[-1]

        return cuda.MemoryPool(allocate)

    def capture(self, call: Callable[[], object]) -> Any:
        """What a call launches, as a graph; nothing runs yet."""
        self.stream.begin_capture()
        try:
            call()
        except BaseException:
            with suppress(Exception):  # that other streams have not come back is no news then
                self.stream.end_capture()
            raise
        return self.stream.end_capture()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A range by that name in a profiler (NVTX): what the host starts inside."""
        if self._nvtx is None:
            yield
            return
        self._nvtx.RangePush(name)
        try:
            yield
        finally:
            self._nvtx.RangePop()

    def beside(self, call: Callable[[], Array]) -> Array:
        """A call's result, made beside what follows on the stream, until `rejoin`."""
        assert self._beside is None, "one call at a time"
        self.side.wait_event(self.point(self.stream))
        with self.side:
            result = call()
        self._beside = self.point(self.side)
        return result

    def rejoin(self) -> None:
        """What follows sees what was made beside."""
        if self._beside is not None:
            self.stream.wait_event(self._beside)
            self._beside = None

    def point(self, stream: Any) -> Any:
        """Where a stream stands, for another one to wait for."""
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def launch(self, graph: Any) -> None:
        with self.span("round"):
            graph.launch(self.stream)

    def graph_seconds(self, graph: Any) -> float:
        """Device time of one launch."""
        begin = self.mark()
        graph.launch(self.stream)
        end = self.mark()
        end.synchronize()
        return self.seconds_between(begin, end)

    def fetch(self, array: Array) -> np.ndarray:
        """Pinned host memory to which the array is being copied; complete at the next `mark`."""
        from cupyx import empty_pinned

        pinned = empty_pinned(array.shape, array.dtype)
        return array.get(stream=self.stream, out=pinned, blocking=False)

    def mark(self) -> Any:
        """This point of the stream; its `synchronize` waits for what comes before."""
        event = self.xp.cuda.Event()
        event.record(self.stream)
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Device time from one mark to a later one, both in the past."""
        return self.xp.cuda.get_elapsed_time(begin, end) / 1e3

    def finish(self) -> None:
        """Wait until all operations are done."""
        self.stream.synchronize()

    def placed_all(self) -> None:
        """Give back what placing weights needed: memory of packed experts, pinned buffers."""
        self.finish()
        self.pool.free_all_blocks()
        self.xp.get_default_pinned_memory_pool().free_all_blocks()

    def lasting(self) -> AbstractContextManager:
        """Memory of what is kept: never a pool of graphs, which write to what they had freed."""
        return self.xp.cuda.using_allocator(self.pool.malloc)

    def positions(self, starts: Array, rows: int) -> Array:
        """starts[r] + 0 .. rows - 1 of every request, one after the other."""
        return (starts[:, None] + self.constant(np.arange, rows, dtype="int32")).reshape(-1)

    def copy(self, source: Array, out: Array) -> None:
        """source into out, both of one dtype; both may be views. CuPy knows no bfloat16."""
        bits = BITS[out.itemsize]
        out.view(bits)[...] = source.view(bits)

    def path_rows(self, rows: Array, nodes: Array, counts: Array) -> Array:
        """rows[R,N,W] along each path -> [R,D,W]; beyond a path's end any row."""
        requests, width, columns = rows.shape
        first = self.constant(np.arange, 0, requests * width, width, dtype="int32")
        path = self.xp.maximum(nodes, 0) + first[:, None]
        flat = rows.reshape(-1, columns).view(np.uint16)
        return self.xp.take(flat, path, axis=0).view(BF16)

    def constant(self, function: Callable[..., np.ndarray], *arguments: Any, **options: Any):
        """What a function of constants gives, made once."""
        hashable = (a.tobytes() if isinstance(a, np.ndarray) else a for a in arguments)
        key = (function, *hashable, *options.values())
        if key not in self._constants:
            with self.active(), self.lasting():
                self._constants[key] = self.array(function(*arguments, **options))
        return self._constants[key]

    def workspace(self, operation: str, words: int, kind: Any = None, dtype: Any = np.int64):
        """At least `words`, passed on from call to call of one kind; zeros before the first."""
        made = self._workspaces.setdefault((operation, kind), [])
        if not made or len(made[-1]) < words:
            with self.lasting():
                made.append(self.xp.zeros(words, dtype))  # captured graphs keep the smaller ones
        return made[-1]


def _profiler_ranges() -> Any:
    """CuPy's NVTX, where it was built with it."""
    try:
        from cupy.cuda import nvtx
    except ImportError:
        return None
    return nvtx if nvtx.available else None


def ranged(operation: Callable) -> Callable:
    """An operation of a backend that shows in profilers by its name."""

    @wraps(operation)
    def call(self: CudaArrays, *given: Any, **options: Any) -> Any:
        with self.span(operation.__name__):
            return operation(self, *given, **options)

    return call
