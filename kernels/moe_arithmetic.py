"""What the experts' kernels compute with: weights from records, products, the activation."""

from numba import cuda, float32

from ddtree_numba.kernels import ptx

LOG2_E = float32(1.4426950408889634)
UNSCALED = float32(256)  # weights come as q * s * 2**-8, see `moe_records.py`


@cuda.jit(device=True, inline="always")
def scales(word, factors, addends, k):
    """A group's factors (row half) as bfloat16 pairs, and the addends that take 8 off a nibble.

    An instruction takes either half of a register for both halves of an operand: pairs cost none.
    """
    low, high = ptx.halves(word)
    factors[k], factors[k + 1] = ptx.joined(low, low), ptx.joined(high, high)
    low, high = ptx.halves(ptx.mul_bf16x2(word, 0x80808008))
    addends[k], addends[k + 1] = ptx.joined(low, low), ptx.joined(high, high)


@cuda.jit(device=True, inline="always")
def dequantize(word, factors, addends, k, a, j):
    """Eight weights as the four registers of an mma's first operand."""
    high = word >> 8
    a[j] = ptx.fma_bf16x2(word & 0x000F000F, factors[k], addends[k])
    a[j + 1] = ptx.fma_bf16x2(word & 0x00F000F0, factors[k + 1], addends[k + 1])
    a[j + 2] = ptx.fma_bf16x2(high & 0x000F000F, factors[k], addends[k])
    a[j + 3] = ptx.fma_bf16x2(high & 0x00F000F0, factors[k + 1], addends[k + 1])


@cuda.jit(device=True, inline="always")
def multiply(total, c, a, i, b, j):
    """total[c .. c + 3] += a[i .. i + 3] b[j, j + 1], 16 rows by 8 columns."""
    total[c], total[c + 1], total[c + 2], total[c + 3] = ptx.mma(
        a[i],
        a[i + 1],
        a[i + 2],
        a[i + 3],
        b[j],
        b[j + 1],
        total[c],
        total[c + 1],
        total[c + 2],
        total[c + 3],
    )


@cuda.jit(device=True, inline="always")
def gated(gate, up):
    """silu(gate) * up."""
    return gate * ptx.rcp(float32(1) + ptx.exp2(-gate * LOG2_E)) * up
