"""Instructions of one lane, each in a kernel of its own: on the executor here, on a GPU beside it.

`test_device.py` has the hardware do the same.
"""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.spec.numerics import F32

from .test_ptx import INSTRUCTIONS, kernel_from, letters, meaning

LANEWISE = [
    name
    for name in INSTRUCTIONS
    if set("".join(letters(name))) <= set("rilhf") and ".sync" not in INSTRUCTIONS[name][0]
    if all(letters(name))
]
VALUES = {"r": "uint32(x[{0}])", "i": "int32(x[{0}])", "h": "x[{0}] & 0xFFFF"}
VALUES["f"] = "ptx.as_float(uint32(x[{0}]))"


def applying(name: str) -> Kernel:
    """A kernel that applies one instruction to a row of random words a thread."""
    results, operands = letters(name)
    given = [VALUES[letter].format(f"4 * i + {n}") for n, letter in enumerate(operands)]
    result = f"ptx.{name}({', '.join(given)})"
    result = {"f": f"ptx.as_bits({result})", "hh": f"ptx.joined(*{result})"}.get(results, result)
    return kernel_from(
        "def body(x: read(uint64), y: write(uint64)):\n"
        "    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x\n"
        f"    y[i] = uint64({result}) & uint64(0x{'F' * (16 if results == 'l' else 8)})",
        f"apply_{name}",
    )


@pytest.mark.parametrize("name", LANEWISE)
def test_runs_in_a_kernel(name, rng):
    """What `test_device.py` compares with the hardware: on the executor, and it compiles."""
    made, words = applying(name), rng.integers(1, 1 << 32, (32, 4), dtype=np.uint64)
    given = dict(r=int, i=lambda w: int(np.uint32(w).view(np.int32)), h=lambda w: int(w) & 0xFFFF)
    given["f"] = lambda w: np.uint32(w).view(F32)
    y = np.zeros(32, np.uint64)
    made.launch(1, words, y)
    assert made.name in made.ptx("sm_90")
    results, operands = letters(name)
    for row, got in zip(words, y, strict=True):
        with np.errstate(all="ignore"):
            value = meaning(name)(*(given[o](w) for o, w in zip(operands, row, strict=False)))
        if results == "hh":
            value = value[0] | value[1] << 16
        elif results == "f":
            value = int(F32.type(value).view(np.uint32))
        assert int(got) == int(value) & (1 << (64 if results == "l" else 32)) - 1
