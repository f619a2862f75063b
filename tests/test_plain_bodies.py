"""Readable kernel bodies become good code: integers without casts, no float64, no division."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, float32, int32

from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.compile import CompileError
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.spec.numerics import F32
from tests.test_ptx import kernel_from


@cuda.jit
def scaled_rows(x: read(float32), y: write(float32), width: int32, factor: float32):
    """Plain Python: signed integers, no cast, a while loop where the count is not constant."""
    row = cuda.blockIdx.x
    i = cuda.threadIdx.x
    while i < width:
        y[row * width + i] = x[row * width + i] * factor + float32(1)
        i += 128


def test_a_plain_body_runs_on_the_cpu_and_compiles_to_a_tight_loop(rng):
    x = rng.standard_normal((3, 300)).astype(F32)
    y = np.empty_like(x)
    made = Kernel(scaled_rows, threads=128)
    made.launch(3, x, y, 300, 0.3)
    assert np.array_equal(y, x * np.float32(0.3) + np.float32(1))
    text = made.ptx("sm_120")
    assert "mul.rn.f32" in text and "add.rn.f32" in text and "fma" not in text
    assert ".f64" not in text and "div" not in text and "rem" not in text
    loop = text[text.index("nounroll") :].split("bra")[0]
    assert loop.count(";") <= 12, "one element: load, two operations, store, counters"
    assert "mul.lo.s32" not in text, "offsets are 64 bits wide"


@pytest.mark.parametrize("line", ["y[0] = x[0] * 0.3", "y[0] = x[0] * n", "y[0] = y[n] * (u + n)"])
def test_float64_is_refused(line):
    text = f"def body(x: read(float32), y: update(float32), n: int32, u: uint64):\n    {line}"
    with pytest.raises(CompileError, match="wide: float64 arithmetic"):
        kernel_from(text, "wide").ptx("sm_90")
    assert kernel_from(text, "meant", float64=True).ptx("sm_90")
