"""One product of the tensor cores: 16 rows by 8 columns, bfloat16 operands, float32 sums."""

from numba import cuda

from ddtree_numba.kernels import ptx


@cuda.jit(device=True, inline="always")
def multiply(sums, z, a0, a1, a2, a3, b0, b1):
    """sums[z .. z + 3] += a b, each a lane's fragment (PTX, mma.m16n8k16)."""
    sums[z], sums[z + 1], sums[z + 2], sums[z + 3] = ptx.mma(
        a0, a1, a2, a3, b0, b1, sums[z], sums[z + 1], sums[z + 2], sums[z + 3]
    )
