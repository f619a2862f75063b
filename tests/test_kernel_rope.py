"""The rotary kernel: its specification's bits in both layouts, views, positions out of reach."""

from functools import cache

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.rope import CHUNK, rope, rope_table
from ddtree_numba.spec import rope as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CASES = spec.CASES | dict(amplitude=spec.CASES["amplitude"] | dict(d=16))  # halves of 8 columns


def far(case):
    return dict(case, first=1000) if case.get("first", 0) > 2000 else case


@cache
def table_of(longest, frequencies, amplitude):
    return rope_table(longest, np.frombuffer(frequencies, F32), amplitude)


def kernel_arguments(given):
    """The kernel takes positions as int32 and the table that frequencies and amplitude make."""
    positions = given["positions"].astype(np.int32)
    longest = int(positions.max(initial=0)) + 1
    table = table_of(longest, given["inv_freq"].tobytes(), given["amplitude"])
    return dict(x=given["x"], positions=positions, table=table, interleaved=given["interleaved"])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_equals_the_specification(name, dtype, rng):
    given = spec.inputs(far(CASES[name]), rng)
    given["x"] = given["x"].astype(dtype)
    expected = spec.rope(**given)
    out = np.empty_like(expected)
    assert rope(**kernel_arguments(given), out=out) is out
    assert out.tobytes() == expected.tobytes()


def test_the_table_has_the_sines_of_the_specification():
    """At the end of K2.6's context, across the pieces in which it is made, with an amplitude."""
    inv_freq = spec.inputs(spec.CASES["k26"], np.random.default_rng(0))["inv_freq"]
    table = rope_table(CHUNK + 3, inv_freq, 1.25)
    for position in (0, 1, CHUNK - 1, CHUNK, CHUNK + 2):
        angle = (np.float32(position) * inv_freq).astype(np.float64)
        both = np.concatenate([np.cos(angle), np.sin(angle)]).astype(F32) * np.float32(1.25)
        assert table[position].tobytes() == both.tobytes()
    assert table.dtype == F32 and table.shape == (CHUNK + 3, 64)


def test_views_in_and_out(rng):
    """Queries are columns 32.. of joint heads; they go behind the latent part of the query."""
    given = spec.inputs(CASES["heads"], rng)
    joint = np.full((17, 8, 48), np.nan, BF16)
    joint[..., 32:] = given["x"]
    query = np.full((17, 8, 80), 7, BF16)
    arguments = kernel_arguments(given) | dict(x=joint[..., 32:])
    rope(**arguments, out=query[..., 64:])
    assert np.ascontiguousarray(query[..., 64:]).tobytes() == spec.rope(**given).tobytes()
    assert (query[..., :64] == 7).all()


def test_rows_may_lie_apart(rng):
    """The shared key: the last columns of the joint projection."""
    given = spec.inputs(CASES["k26_key"], rng)
    joint = np.full((17, 160), np.nan, BF16)
    joint[:, 96:] = given["x"]
    out = np.empty((17, 64), BF16)
    rope(**kernel_arguments(given) | dict(x=joint[:, 96:]), out=out)
    assert out.tobytes() == spec.rope(**given).tobytes()


@pytest.mark.parametrize("name", ["heads", "half_split"])
def test_works_in_place(name, rng):
    given = spec.inputs(CASES[name], rng)
    expected = spec.rope(**given)
    rope(**kernel_arguments(given), out=given["x"])
    assert given["x"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_row_has_the_same_bits_alone(interleaved, rng):
    x = rng.standard_normal((9, 5, 32)).astype(F32)
    positions = rng.integers(0, 300, 9).astype(np.int32)
    table = rope_table(300, spec.yarn_frequencies(32, 50000.0, None))
    together = rope(x, positions, table, interleaved, out=np.empty_like(x))
    for t in range(9):
        row = slice(t, t + 1)
        alone = rope(x[row], positions[row], table, interleaved, out=np.empty_like(x[row]))
        assert alone.tobytes() == together[row].tobytes()
        head = np.ascontiguousarray(x[row, 4])
        turned = rope(head, positions[row], table, interleaved, out=np.empty_like(head))
        assert turned.tobytes() == together[t, 4].tobytes()


def test_m01_a_nan_row_and_a_position_beyond_the_table_stay_by_themselves(rng):
    given = kernel_arguments(spec.inputs(CASES["heads"], rng))
    clean = rope(**given, out=np.empty_like(given["x"]))
    given["x"][4] = np.nan
    given["positions"][6], given["positions"][9] = len(given["table"]), -1
    out = rope(**given, out=np.empty_like(given["x"])).astype(F32)
    assert np.isnan(out[[4, 6, 9]]).all()
    others = np.delete(np.arange(17), [4, 6, 9])
    assert np.array_equal(out[others], clean.astype(F32)[others])


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    x, positions, table = np.zeros((2, 3, 16), F32), np.zeros(2, np.int32), np.zeros((9, 16), F32)
    good = dict(x=x, positions=positions, table=table, out=np.empty_like(x))
    rope(**good)
    for change, message in (
        (dict(positions=positions[:1]), "positions: shape"),
        (dict(positions=positions.astype(np.int64)), "positions: dtype int64, expected int32"),
        (dict(table=table[:, :8]), "table: shape"),
        (dict(out=x[:, :1]), r"out: float32 \(2, 1, 16\), expected float32 \(2, 3, 16\)"),
        (dict(x=x[None], out=x[None]), "x: shape"),
        (dict(x=np.zeros((2, 3, 32), F32)[..., ::2]), "x: strides"),
        (dict(x=x[..., :12], out=x[..., :12]), "x: 12 columns"),
        (dict(x=x[..., :8], out=x[..., :8], interleaved=False), "x: 8 columns"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            rope(**good | change)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["far", "k26", "k26_key", "k26_draft"])
@pytest.mark.parametrize("tokens", [1, 17, 4096])
def test_gpu_equals_the_specification(name, tokens, rng):
    given = spec.inputs(CASES[name] | dict(T=tokens, first=262_144 - tokens), rng)
    device = to_gpu(kernel_arguments(given))
    out = rope(**device, out=to_gpu(np.zeros_like(given["x"])))
    assert to_host(out).tobytes() == spec.rope(**given).tobytes()
