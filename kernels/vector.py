"""Eight activations at a time: 16 bytes of bfloat16 or 32 of float32, as float32 in registers.

`load8[dtype](x, i, values, k)` puts x[i .. i + 7] into values[k .. k + 7] of a local array,
`store8[dtype](y, i, values, k)` rounds them once into y. i must be a multiple of 8, y aligned.

Both in two steps, for loads that shall be under way together: `fetch8` and `put8` move the words
as they lie in memory, WORDS8[dtype] of them; `widen8(words, k, values, j)` makes floats of them and
`round8(values, j, words, k)` words of floats.
"""

from numba import cuda, float32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16

WIDTH = 8
WORDS8 = {bf16: 4, float32: 8}


@cuda.jit(device=True, inline="always")
def _fetch8_bf16(x, i, words, k):
    words[k], words[k + 1], words[k + 2], words[k + 3] = ptx.ldg4(x, i)


@cuda.jit(device=True, inline="always")
def _fetch8_float32(x, i, words, k):
    words[k], words[k + 1], words[k + 2], words[k + 3] = ptx.ldg4(x, i)
    words[k + 4], words[k + 5], words[k + 6], words[k + 7] = ptx.ldg4(x, i + 4)


@cuda.jit(device=True, inline="always")
def _put8_bf16(y, i, words, k):
    ptx.stg4(y, i, words[k], words[k + 1], words[k + 2], words[k + 3])


@cuda.jit(device=True, inline="always")
def _put8_float32(y, i, words, k):
    ptx.stg4(y, i, words[k], words[k + 1], words[k + 2], words[k + 3])
    ptx.stg4(y, i + 4, words[k + 4], words[k + 5], words[k + 6], words[k + 7])


@cuda.jit(device=True, inline="always")
def _widen8_bf16(words, k, values, j):
    for n in range(4):
        values[j + 2 * n] = ptx.as_float(words[k + n] << 16)
        values[j + 2 * n + 1] = ptx.as_float(words[k + n] & 0xFFFF0000)


@cuda.jit(device=True, inline="always")
def _widen8_float32(words, k, values, j):
    for n in range(8):
        values[j + n] = ptx.as_float(words[k + n])


@cuda.jit(device=True, inline="always")
def _round8_bf16(values, j, words, k):
    for n in range(4):
        words[k + n] = ptx.pack_bf16(values[j + 2 * n + 1], values[j + 2 * n])


@cuda.jit(device=True, inline="always")
def _round8_float32(values, j, words, k):
    for n in range(8):
        words[k + n] = ptx.as_bits(values[j + n])


@cuda.jit(device=True, inline="always")
def _load8_bf16(x, i, values, k):
    a, b, c, d = ptx.ldg4(x, i)
    values[k] = ptx.as_float(a << 16)
    values[k + 1] = ptx.as_float(a & 0xFFFF0000)
    values[k + 2] = ptx.as_float(b << 16)
    values[k + 3] = ptx.as_float(b & 0xFFFF0000)
    values[k + 4] = ptx.as_float(c << 16)
    values[k + 5] = ptx.as_float(c & 0xFFFF0000)
    values[k + 6] = ptx.as_float(d << 16)
    values[k + 7] = ptx.as_float(d & 0xFFFF0000)


@cuda.jit(device=True, inline="always")
def _load8_float32(x, i, values, k):
    values[k], values[k + 1], values[k + 2], values[k + 3] = ptx.ldg4_f(x, i)
    values[k + 4], values[k + 5], values[k + 6], values[k + 7] = ptx.ldg4_f(x, i + 4)


@cuda.jit(device=True, inline="always")
def _store8_bf16(y, i, values, k):
    a = ptx.pack_bf16(values[k + 1], values[k])
    b = ptx.pack_bf16(values[k + 3], values[k + 2])
    c = ptx.pack_bf16(values[k + 5], values[k + 4])
    d = ptx.pack_bf16(values[k + 7], values[k + 6])
    ptx.stg4(y, i, a, b, c, d)


@cuda.jit(device=True, inline="always")
def _store8_float32(y, i, values, k):
    ptx.stg4_f(y, i, values[k], values[k + 1], values[k + 2], values[k + 3])
    ptx.stg4_f(y, i + 4, values[k + 4], values[k + 5], values[k + 6], values[k + 7])


@cuda.jit(device=True, inline="always")
def _round_bf16(value):
    return ptx.as_float(ptx.round_bf16(value) << 16)


@cuda.jit(device=True, inline="always")
def _keep(value):
    return value


load8 = {bf16: _load8_bf16, float32: _load8_float32}
store8 = {bf16: _store8_bf16, float32: _store8_float32}
rounded = {bf16: _round_bf16, float32: _keep}
fetch8 = {bf16: _fetch8_bf16, float32: _fetch8_float32}
put8 = {bf16: _put8_bf16, float32: _put8_float32}
widen8 = {bf16: _widen8_bf16, float32: _widen8_float32}
round8 = {bf16: _round8_bf16, float32: _round8_float32}
