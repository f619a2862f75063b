"""Instructions compile as written, and their CPU meanings equal independent formulas."""

import inspect
import math
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, float32, int32, uint16, uint32, uint64
from numba.core.errors import TypingError
from numba.cuda.cudadrv.error import NvvmWarning

from ddtree_numba.kernels import asm, ptx, ptx_cpu, ptx_cpu_arithmetic, ptx_cpu_copies, simt
from ddtree_numba.kernels.arguments import bf16, read, update, write
from ddtree_numba.kernels.compile import link
from ddtree_numba.kernels.launch import Kernel
from ddtree_numba.spec.numerics import BF16, F32

INSTRUCTIONS = {name: v.declaration for name, v in vars(ptx).items() if hasattr(v, "declaration")}
SAMPLES = {"r": "a", "i": "a", "l": "l", "h": "a", "f": "f", "g": "x, 4", "s": "s", "n": "1"}


def kernel_from(text: str, name: str, **options) -> Kernel:
    """A kernel from the text of `def body(...)`."""
    space = dict(
        ptx=ptx, cuda=cuda, read=read, write=write, update=update, float32=float32, int32=int32,
        uint32=uint32, uint64=uint64,
    )  # fmt: skip
    exec(text, space)
    return Kernel(cuda.jit(space["body"]), threads=32, name=name, **options)


def letters(name):
    """(results, operands) of an instruction."""
    results, _, sources = INSTRUCTIONS[name][1].rpartition("=")
    return "".join(asm.OPERANDS.findall(results)), "".join(asm.OPERANDS.findall(sources))


def meaning(name):
    modules = (ptx_cpu, ptx_cpu_arithmetic, ptx_cpu_copies)
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_has_a_meaning_on_the_cpu(name):
    _, operands = letters(name)
    assert meaning(name) is not None
    inspect.signature(meaning(name)).bind(*range(len(operands) + operands.count("g")))


def issuing(names) -> Kernel:
    """A kernel that issues every named instruction once, made as text."""
    lines = ["def body(x: update(uint32), y: write(uint32), l: uint64, f: float32, a: int32):"]
    lines += ["    s = ptx.shared_address(cuda.shared.array(64, uint32, alignment=16))"]
    for number, name in enumerate(names):
        results, operands = letters(name)
        call = f"ptx.{name}({', '.join(SAMPLES[letter] for letter in operands)})"
        out = [f"v{i}" for i in range(len(results))]
        lines.append(f"    {', '.join(out)} = {call}" if out else f"    {call}")
        for value, letter in zip(out, results, strict=True):
            bits = f"ptx.as_bits({value})" if letter == "f" else value
            lines.append(f"    y[{number}] = uint32({bits})")
    return kernel_from("\n".join(lines), "instructions")


def test_every_instruction_compiles_as_written():
    """In one kernel, for both architectures; the assembler checks what we wrote."""
    made = issuing(INSTRUCTIONS)
    text = made.ptx("sm_120")
    for mnemonic, _ in INSTRUCTIONS.values():
        assert mnemonic in text
    for arch in ("sm_90", "sm_120"):
        assert link(text, made.name, arch).spill_bytes == 0


def test_operands_are_written_in_the_order_of_the_declaration():
    text = issuing(["copy_wait", "fma", "copy16_part"]).ptx("sm_90")
    assert "cp.async.wait_group 1;" in text
    assert "fma.rn.f32 %f" in text
    (line,) = [line for line in text.splitlines() if "cp.async.cg" in line]
    assert line.count("[") == 2 and ", 16, %r" in line


@pytest.mark.parametrize(
    "call, message",
    [
        ("ptx.add(f, 1.0)", "float64 where float32 is meant"),
        ("ptx.add(f, a)", "int32 where float32 is meant"),
        ("ptx.clz(f)", "float32 where an integer is meant"),
        ("ptx.ldg1(a, 0)", "int32 is neither a pointer nor an array"),
    ],
)
def test_wrong_operands_are_named(call, message):
    made = kernel_from(f"def body(x: update(uint32), f: float32, a: int32):\n    {call}", "wrong")
    with pytest.raises(TypingError, match=message):
        made.ptx("sm_90")


def test_an_operand_that_must_be_constant_may_be_an_expression_of_constants():
    head = "N = 3\ndef body(x: update(uint32), a: int32):\n    "
    assert "wait_group 1;" in kernel_from(head + "ptx.copy_wait(N - 2)", "constant").ptx("sm_90")
    with pytest.raises(NvvmWarning, match="invalid operand for inline asm constraint 'n'"):
        kernel_from(head + "ptx.copy_wait(a)", "varying").ptx("sm_90")


# --- arithmetic


def exact_fma(a, b, c):
    """Correctly rounded float32 of a rational number, by trying the neighbours."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-math.inf)), near, np.nextafter(near, np.float32(1e38))]
    distance = [abs(Fraction(float(v)) - exact) for v in around]
    best = [v for v, d in zip(around, distance, strict=True) if d == min(distance)]
    return best[0] if len(best) == 1 else next(v for v in best if not int(v.view(np.uint32)) & 1)


def test_fma_rounds_once(rng):
    bits = rng.integers(0, 1 << 24, (400, 3)) + (1 << 23)
    a, b, c = (bits * 2.0 ** rng.integers(-30, 30, (400, 3))).astype(F32).T
    c = np.concatenate([c[:200], (-a[200:] * b[200:]).astype(F32)])  # cancellation
    for values in zip(a, b, c, strict=True):
        assert ptx_cpu_arithmetic.fma(*values) == exact_fma(*values)
    a, b = np.float32((1 + 2**-23) * 2**-12), np.float32((1 - 2**-23) * 2**-12)
    c = np.float32(1 + 2**-23)  # float64 rounds the sum to a tie, which is not where it lies
    assert ptx_cpu_arithmetic.fma(a, b, c) == c == exact_fma(a, b, c)


def test_bfloat16_rounds_to_nearest_even(rng):
    values = rng.integers(0, 1 << 32, 2000, dtype=np.uint32).view(F32)
    values = np.append(values[~np.isnan(values)], [F32.type(1 + 2**-8), F32.type(np.inf)])
    expected = values.astype(BF16).view(np.uint16)
    assert [ptx_cpu_arithmetic.round_bf16(v) for v in values] == expected.tolist()
    assert ptx_cpu_arithmetic.round_bf16(np.float32(np.nan)) == 0x7FFF


def test_packed_bfloat16_arithmetic_rounds_once(rng):
    words = rng.standard_normal((3, 300, 2)).astype(BF16)
    a, b, c = (word.view(np.uint32)[:, 0] for word in words)
    wide = words.astype(np.float64)
    got = [meaning("mul_bf16x2")(int(u), int(v)) for u, v in zip(a, b, strict=True)]
    assert got == (wide[0] * wide[1]).astype(BF16).view(np.uint32)[:, 0].tolist()
    got = [meaning("fma_bf16x2")(*map(int, each)) for each in zip(a, b, c, strict=True)]
    assert got == (wide[0] * wide[1] + wide[2]).astype(BF16).view(np.uint32)[:, 0].tolist()
    one, tie, above = 0x3F80, 0x3B80, 0x3F81  # 1, 2^-8, 1 + 2^-7
    assert meaning("fma_bf16x2")(one, one, tie) & 0xFFFF == one
    assert meaning("fma_bf16x2")(tie, above, one) & 0xFFFF == above


@pytest.mark.parametrize(
    "name, operands, result",
    [
        ("prmt", (0x33221100, 0x77665544, 0x7531), 0x77553311),
        ("prmt", (0x80, 0, 0x8888), 0xFFFFFFFF),
        ("halves", (0xFEDC1234,), (0x1234, 0xFEDC)),
        ("joined", (0x1234, 0xFEDC), 0xFEDC1234),
        ("mul_wide", (0xFFFFFFFF, 2), 0x1FFFFFFFE),
        ("divide", (0xFFFFFFFF, 10), 429496729),
        ("clz", (1,), 31),
        ("clz", (0,), 32),
        ("to_int", (np.float32(-2.7),), -2),
        ("to_int", (np.float32(1e20),), 2**31 - 1),
        ("to_int", (np.float32(np.nan),), 0),
        ("to_float", (2**24 + 1,), np.float32(2**24)),
        ("rint", (np.float32(2.5),), np.float32(2)),
        ("fmax", (np.float32(np.nan), np.float32(1)), np.float32(1)),
        ("as_float", (0x3F800000,), np.float32(1)),
        ("as_bits", (np.float32(-2),), 0xC0000000),
        ("pack_bf16", (np.float32(1), np.float32(-2)), 0x3F80C000),
    ],
)
def test_bits(name, operands, result):
    assert meaning(name)(*operands) == result


@pytest.mark.parametrize(
    "name, operands, result",
    [
        ("fmax", (0x80000000, 0x00000000), 0x00000000),
        ("fmax", (0x00000000, 0x80000000), 0x00000000),
        ("fmin", (0x80000000, 0x00000000), 0x80000000),
        ("fmin", (0x00000000, 0x80000000), 0x80000000),
        ("fmax", (0x7FC00000, 0xFF800000), 0xFF800000),  # NaN, -infinity
        ("fmax", (0xC0000000, 0x7FB7F614), 0xC0000000),  # -2, a signalling NaN
        ("fmin", (0xFFB1941F, 0x40000000), 0x40000000),  # a signalling NaN, 2
        ("fmin", (0xFFB1941F, 0x7FC00000), 0x7FFFFFFF),  # the NaN that PTX writes
        ("fmax", (0x00000001, 0x80000001), 0x00000001),  # subnormal numbers stay
        ("rcp", (0x807FFFFF,), 0xFF800000),  # subnormal: 1 / -0
        ("rcp", (0x00000000,), 0x7F800000),
        ("rcp", (0x7F000000,), 0x00000000),  # 2^127: its reciprocal is subnormal
        ("rcp", (0x7E800000,), 0x00800000),  # 2^126
        ("rcp", (0xFF800000,), 0x80000000),
        ("exp2", (0xC2FC0000,), 0x00800000),  # -126
        ("exp2", (0xC2FC8000,), 0x00000000),  # -126.25
        ("exp2", (0x80000001,), 0x3F800000),
    ],
)
def test_bits_at_the_ends_of_the_numbers(name, operands, result):
    with np.errstate(all="ignore"):
        made = meaning(name)(*map(ptx_cpu_arithmetic.as_float, operands))
    assert made.dtype == F32 and ptx_cpu_arithmetic.as_bits(made) == result


# --- fragments


@cuda.jit
def one_product(a: read(bf16), b: read(bf16), d: write(float32)):
    """D[16, 8] = A[16, 16] B[8, 16]^T through shared memory, one warp."""
    tiles = cuda.shared.array(384, uint16, alignment=16)
    base = ptx.shared_address(tiles)
    lane = cuda.laneid
    ptx.copy16(base + lane * 16, a, lane * 8)
    if lane < 16:
        ptx.copy16(base + 512 + lane * 16, b, lane * 8)
    ptx.copy_commit()
    ptx.copy_wait(0)
    cuda.syncwarp()
    a0, a1, a2, a3 = ptx.ldmatrix4(base + (lane & 15) * 32 + (lane >> 4) * 16)
    b0, b1 = ptx.ldmatrix2(base + 512 + (lane & 7) * 32 + (lane >> 3 & 1) * 16)
    zero = float32(0)
    d0, d1, d2, d3 = ptx.mma(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
    i = (lane >> 2) * 8 + (lane & 3) * 2
    d[i] = d0
    d[i + 1] = d1
    d[i + 64] = d2
    d[i + 65] = d3


def test_fragments_make_a_matrix_product(rng):
    a, b = rng.standard_normal((16, 16)).astype(BF16), rng.standard_normal((8, 16)).astype(BF16)
    d = np.empty((16, 8), F32)
    simt.run(one_product, 1, 32, (a, b, d))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.array_equal(d, expected.astype(F32))
    for column in range(8):  # a token's bits do not know its column
        moved = np.empty((16, 8), F32)
        simt.run(one_product, 1, 32, (a, np.roll(b, column, 0), moved))
        assert np.array_equal(moved, np.roll(d, column, 1))


@cuda.jit
def transposed(x: read(bf16), y: write(uint32)):
    tile = cuda.shared.array(256, uint16, alignment=16)
    base = ptx.shared_address(tile)
    for i in range(8):
        tile[cuda.laneid * 8 + i] = x[cuda.laneid * 8 + i]
    cuda.syncwarp()
    a, b, c, d = ptx.ldmatrix4_t(base + cuda.laneid * 16)
    ptx.stg4(y, cuda.laneid * 4, a, b, c, d)


def test_ldmatrix_transposes_each_8_by_8_tile():
    x = np.arange(256, dtype=np.uint16).view(BF16)
    y = np.empty(128, np.uint32)
    simt.run(transposed, 1, 32, (x, y))
    got = y.view(np.uint16).reshape(32, 4, 2).swapaxes(0, 1).reshape(4, 8, 8)
    assert np.array_equal(got, x.view(np.uint16).reshape(4, 8, 8).swapaxes(1, 2))
