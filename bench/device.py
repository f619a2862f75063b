"""Where a bench runs: `Gpu` through CuPy, `Cpu` for smoke runs on the executor.

Both hold arrays, run a sequence of launches and say how long it took; `seconds` of a Gpu is device
time between two events, with the caches cold. `python -m bench.device WHO` is one line and status 1
where no GPU can run the kernels.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from ddtree_numba.kernels import driver

POISON = 0xC5  # a byte: bfloat16 and float32 -6.3e3, int32 -9.8e8; no padding looks like it
WARM_SECONDS = 0.1  # clocks rise meanwhile: an idle H200 runs at a sixth of its rate


class Cpu:
    """NumPy arrays and the CPU executor; nothing is cold, and time means little."""

    l2_bytes = 1

    def array(self, host: np.ndarray) -> np.ndarray:
        return np.array(host, order="C")

    def poisoned(self, like: np.ndarray) -> np.ndarray:
        array = np.empty(like.shape, like.dtype)
        array.reshape(-1).view(np.uint8)[...] = POISON
        return array

    def copy(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def host(self, array: np.ndarray) -> np.ndarray:
        return array

    def run(self, work: Callable[[Any], None]) -> None:
        work(None)

    def capture(self, work: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: work(None)

    def warm(self, replay: Callable[[], None]) -> None:
        pass

    def seconds(self, replay: Callable[[], None]) -> float:
        start = time.perf_counter()
        replay()
        return time.perf_counter() - start


class Gpu:
    """The current CUDA device, one stream for everything."""

    def __init__(self) -> None:
        self.arch = driver.arch_of(0)  # names what is missing where there is no GPU
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(0).use()
        self.properties = cupy.cuda.runtime.getDeviceProperties(0)
        self.l2_bytes = driver.attribute(0, "L2_CACHE_SIZE")
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.start, self.stop = cupy.cuda.Event(), cupy.cuda.Event()
        with self.stream:
            self.beyond_l2 = cupy.ones(2 * self.l2_bytes // 4, np.int32)
            self.total = cupy.empty((), np.int64)

    def array(self, host: np.ndarray) -> Any:
        with self.stream:
            return self.cupy.asarray(np.ascontiguousarray(host))

    def poisoned(self, like: np.ndarray) -> Any:
        with self.stream:
            array = self.cupy.empty(like.shape, like.dtype)
            array.data.memset_async(POISON, array.nbytes, self.stream)
            return array

    def copy(self, array: Any) -> Any:
        with self.stream:
            return array.copy()

    def host(self, array: Any) -> np.ndarray:
        return array.get(stream=self.stream)

    def run(self, work: Callable[[Any], None]) -> None:
        with self.stream:
            work(self.stream)
        self.stream.synchronize()

    def capture(self, work: Callable[[Any], None]) -> Callable[[], None]:
        """`work` as one CUDA graph; kernels must have run before, so that they are loaded."""
        with self.stream:
            self.stream.begin_capture()
            try:
                work(self.stream)
            finally:
                graph = self.stream.end_capture()
        graph.upload(self.stream)
        return lambda: graph.launch(self.stream)

    def warm(self, replay: Callable[[], None]) -> None:
        end = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < end:
            self.seconds(replay)

    def seconds(self, replay: Callable[[], None]) -> float:
        """Device time of one replay, all of its data outside of L2.

        Reading evicts without leaving lines to write back, and hides the launch from the host.
        """
        with self.stream:
            self.cupy.sum(self.beyond_l2, out=self.total)
            self.start.record(self.stream)
            replay()
            self.stop.record(self.stream)
        self.stop.synchronize()
        return self.cupy.cuda.get_elapsed_time(self.start, self.stop) / 1e3

    def median_seconds(self, replay: Callable[[], None], rounds: int = 30) -> float:
        self.warm(replay)
        return median(self.seconds(replay) for _ in range(rounds))


def main(who: str) -> None:
    try:
        driver.visible()
    except driver.DeviceError as error:
        sys.exit(f"{who}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
