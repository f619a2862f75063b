"""The PTX instructions that kernels use, one line each; `asm.py` explains the notation.

Memory instructions are named by what they move: ld or st, g for global or s for shared, the number
of 32-bit words, _f for float32 and _h for 16 bits. Global operands take (pointer, index), the index
counted in elements of the pointer; a vector access must be aligned to its size. Their meaning on
the CPU is in `ptx_cpu.py`, under the same names.
"""

from ddtree_numba.kernels.asm import at, op, shared_address

__all__ = ["at", "shared_address"]

# Global memory. Once: read once, no place in L1, and not .nc, loads of which ptxas moves behind
# `wait_for_previous`. Pointers also read and write as x[i].
ldg1 = op("ld.global.u32", "r = [g]")
ldg2 = op("ld.global.v2.u32", "{rr} = [g]")
ldg4 = op("ld.global.v4.u32", "{rrrr} = [g]")
ldg2_f = op("ld.global.v2.f32", "{ff} = [g]")
ldg4_f = op("ld.global.v4.f32", "{ffff} = [g]")
ldg4_once = op("ld.global.L1::no_allocate.L2::128B.v4.u32", "{rrrr} = [g]")
stg1 = op("st.global.u32", "[g], r")
stg2 = op("st.global.v2.u32", "[g], {rr}")
stg4 = op("st.global.v4.u32", "[g], {rrrr}")
stg4_f = op("st.global.v4.f32", "[g], {ffff}")
prefetch_l2 = op("prefetch.global.L2", "[g]")

# Global memory that other blocks or devices write meanwhile.
ld_volatile = op("ld.volatile.global.u32", "r = [g]")
ld_volatile4 = op("ld.volatile.global.v4.u32", "{rrrr} = [g]")
st_volatile = op("st.volatile.global.u32", "[g], r")
st_volatile4 = op("st.volatile.global.v4.u32", "[g], {rrrr}")
ld_acquire = op("ld.acquire.gpu.global.u32", "r = [g]")
st_release = op("st.release.gpu.global.u32", "[g], r")
ld_acquire_sys = op("ld.acquire.sys.global.u32", "r = [g]")
fence_sys = op("fence.acq_rel.sys")
atom_add = op("atom.global.add.u32", "r = [g], r")
atom_cas = op("atom.global.cas.b32", "r = [g], r, r")
atom_add_acq_rel = op("atom.acq_rel.gpu.global.add.u64", "l = [g], l")
red_add_u64 = op("red.global.add.u64", "[g], l")
red_max_u64 = op("red.global.max.u64", "[g], l")

# Shared memory, by byte address.
lds2 = op("ld.shared.v2.u32", "{rr} = [s]")
lds4 = op("ld.shared.v4.u32", "{rrrr} = [s]")
lds1_f = op("ld.shared.f32", "f = [s]")
lds2_f = op("ld.shared.v2.f32", "{ff} = [s]")
lds4_f = op("ld.shared.v4.f32", "{ffff} = [s]")
sts1 = op("st.shared.u32", "[s], r")
sts1_f = op("st.shared.f32", "[s], f")
sts2_f = op("st.shared.v2.f32", "[s], {ff}")
sts4_f = op("st.shared.v4.f32", "[s], {ffff}")
sts1_h = op("st.shared.u16", "[s], h")
ldmatrix4 = op("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "{rrrr} = [s]")
ldmatrix4_t = op("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "{rrrr} = [s]")
ldmatrix2 = op("ldmatrix.sync.aligned.m8n8.x2.shared.b16", "{rr} = [s]")

# Asynchronous copies of 16 bytes, global to shared, past L1. Of `copy16_part` the last operand says
# how many bytes are read (0 to 16); zeros fill the rest.
copy16 = op("cp.async.cg.shared.global", "[s], [g], 16")
copy16_part = op("cp.async.cg.shared.global", "[s], [g], 16, r")
copy_commit = op("cp.async.commit_group")
copy_wait = op("cp.async.wait_group", "n")  # all but the latest n groups of this thread are there

# Tensor cores: D[16, 8] = A[16, 16] B[16, 8] + C, bfloat16 operands, float32 sums.
mma = op("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "{ffff} = {rrrr}, {rr}, {ffff}")

# Float arithmetic with its rounding: no compiler contracts or reorders it.
add = op("add.rn.f32", "f = f, f")
sub = op("sub.rn.f32", "f = f, f")
mul = op("mul.rn.f32", "f = f, f")
fma = op("fma.rn.f32", "f = f, f, f")
div = op("div.rn.f32", "f = f, f")
fmax = op("max.f32", "f = f, f")  # of a number and a NaN: the number; +0 is above -0
fmin = op("min.f32", "f = f, f")
rint = op("cvt.rni.f32.f32", "f = f")
exp2 = op("ex2.approx.ftz.f32", "f = f")  # error below 2 ulp; no subnormals in or out
rcp = op("rcp.approx.ftz.f32", "f = f")  # relative error to 2^-23; no subnormals in or out
to_int = op("cvt.rzi.s32.f32", "i = f")
to_float = op("cvt.rn.f32.s32", "f = i")

# Bits, bfloat16.
as_float = op("mov.b32", "f = r")
as_bits = op("mov.b32", "r = f")
round_bf16 = op("cvt.rn.bf16.f32", "h = f")
pack_bf16 = op("cvt.rn.bf16x2.f32", "r = f, f")  # (high, low)
mul_bf16x2 = op("mul.rn.bf16x2", "r = r, r")  # sm_90
fma_bf16x2 = op("fma.rn.bf16x2", "r = r, r, r")
prmt = op("prmt.b32", "r = r, r, r")
halves = op("mov.b32", "{hh} = r")  # (low, high)
joined = op("mov.b32", "r = {hh}")  # of low and high; twice the same half costs nothing
mul_wide = op("mul.wide.u32", "l = r, r")
divide = op("div.u32", "r = r, r")  # // of 64 bits is a function call
clz = op("clz.b32", "i = r")

# Warps. Every lane takes part.
shfl_xor = op("shfl.sync.bfly.b32", "r = r, r, 0x1f, 0xffffffff")
shfl_up = op("shfl.sync.up.b32", "r = r, r, 0, 0xffffffff")  # below lane 0: the own value
shfl_idx = op("shfl.sync.idx.b32", "r = r, r, 0x1f, 0xffffffff")
shfl_xor_f = op("shfl.sync.bfly.b32", "f = f, r, 0x1f, 0xffffffff")
redux_add = op("redux.sync.add.u32", "r = r, 0xffffffff")
redux_max = op("redux.sync.max.u32", "r = r, 0xffffffff")
redux_min = op("redux.sync.min.u32", "r = r, 0xffffffff")

# Nanoseconds of the device's clock, in steps of up to a microsecond.
globaltimer = op("mov.u64", "l = %globaltimer")

# Barrier `n` of 1 to 15 for the given number of threads; barrier 0 is cuda.syncthreads().
bar_sync = op("bar.sync", "n, r")

# Programmatic dependent launch (sm_90): wait for the kernels before, let the next one start.
wait_for_previous = op("griddepcontrol.wait")
launch_next = op("griddepcontrol.launch_dependents")
