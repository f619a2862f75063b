"""A made-up operation, on a device whose clock is made up too: for tests of the bench harness."""

from statistics import median
from types import SimpleNamespace

import numpy as np

from bench.cases import Case
from bench.device import Cpu
from ddtree_numba.spec.numerics import Cost

L2 = 1000
LAUNCH_SECONDS = 2e-6


def double(x, table):
    return x * np.float32(2) + table[0]


SPEC = SimpleNamespace(
    __name__="toy.double",
    double=double,
    CASES={"small": dict(T=3), "k26": dict(T=50)},
    inputs=lambda dims, rng: dict(
        x=rng.standard_normal(dims["T"]).astype(np.float32), table=np.ones(9, np.float32)
    ),
    cost=lambda dims: Cost(bytes=8 * dims["T"], flops=2 * dims["T"]),
    TOLERANCE=0,
)
CASE = Case(SPEC, "k26", dict(T=50), on_gpu=True)


class FakeGpu(Cpu):
    """A launch takes two microseconds; `used` holds the arrays of each launch of a round."""

    l2_bytes, arch = L2, "sm_90"

    def __init__(self):
        self.used = []

    def kernel(self, x, table, *, out, stream=None):
        self.used.append((x, table, out))
        out[...] = double(x, table)
        return out

    def seconds(self, replay):
        self.used.clear()
        replay()
        return LAUNCH_SECONDS * len(self.used)


class FakeBenchmark:
    enabled = True

    def __init__(self, clock):
        self.clock, self.stats = clock, None

    def pedantic(self, target, rounds=1, warmup_rounds=0):
        times = []
        for _ in range(rounds + warmup_rounds):
            start = self.clock()
            target()
            times.append(self.clock() - start)
        if self.enabled:
            middle = median(times)
            stats = SimpleNamespace(median=middle, q1=middle, q3=middle, rounds=rounds)
            self.stats = SimpleNamespace(stats=stats)
