"""Norm and rotation of heads in one launch: the bits of the kernels apart, views, the law."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.arguments import bf16
from ddtree_numba.kernels.qk_norm_rope import make, qk_norm_rope
from ddtree_numba.kernels.rms_norm import rms_norm
from ddtree_numba.kernels.rope import rope, rope_table
from ddtree_numba.spec import qk_norm_rope as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CASES = {name: case | dict(T=min(case["T"], 8)) for name, case in spec.CASES.items()}
FIRST = 30  # position of the first row


def arguments(case, rng, dtype=BF16):
    """What the kernel takes: the table in place of the frequencies."""
    given = spec.inputs(case, rng)
    given |= {k: given[k].astype(dtype) for k in ("joint", "q_norm", "k_norm")}
    given["positions"] = (FIRST + np.arange(case["T"])).astype(np.int32)
    given["table"] = rope_table(FIRST + case["T"], given["inv_freq"], given["amplitude"])
    return {k: v for k, v in given.items() if k not in ("inv_freq", "amplitude")}


def run(joint, **given):
    out = np.full(joint.shape, 7, joint.dtype)
    assert qk_norm_rope(joint, **given, out=out) is out
    return out


def apart(joint, q_norm, k_norm, eps, positions, table, queries, keys, empty=np.empty):
    """By a launch for each norm and each rotation, over copies of the heads."""
    out = joint.copy()
    for norm, first, count in ((q_norm, 0, queries), (k_norm, queries, keys)):
        if count:
            heads = joint[:, first : first + count].copy()
            normed = empty(heads.shape, joint.dtype)
            rows = heads.reshape(-1, heads.shape[-1])
            rms_norm(rows, norm, eps, out=normed.reshape(rows.shape))
            rope(normed, positions, table, interleaved=False, out=out[:, first : first + count])
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_has_the_bits_of_the_kernels_apart(name, dtype, rng):
    given = arguments(CASES[name], rng, dtype)
    got = run(**given)
    assert got.dtype == dtype and got.tobytes() == apart(**given).tobytes()


@pytest.mark.parametrize("name", ["one_row", "tiny", "k26"])
def test_agrees_with_the_specification(name, rng):
    given = spec.inputs(CASES[name], rng)
    given["positions"] = FIRST + np.arange(CASES[name]["T"])
    expected = spec.qk_norm_rope(**given)
    table = rope_table(FIRST + CASES[name]["T"], given.pop("inv_freq"), given.pop("amplitude"))
    given |= dict(positions=given["positions"].astype(np.int32), table=table)
    got = run(**given)
    np.testing.assert_allclose(got.astype(F32), expected.astype(F32), **spec.TOLERANCE)


def test_s09_a_row_has_the_same_bits_alone(rng):
    given = arguments(CASES["tiny"], rng)
    out = run(**given)
    for i in (0, 4, 7):
        row = slice(i, i + 1)
        alone = run(**given | {k: given[k][row] for k in ("joint", "positions")})
        assert alone.tobytes() == out[row].tobytes()


def test_m01_a_nan_head_and_a_position_beyond_the_table_stay_by_themselves(rng):
    given = arguments(CASES["tiny"], rng)
    clean = run(**given)
    given["joint"][1, 2, 5] = np.nan
    given["positions"][2], given["positions"][3] = -1, len(given["table"])
    out = run(**given)
    wrong = np.zeros(out.shape[:2], bool)
    wrong[1, 2] = wrong[2:4, :6] = True  # the values of a row do not turn
    assert np.isnan(out[wrong].astype(F32)).all()
    assert out[~wrong].tobytes() == clean[~wrong].tobytes()


def test_heads_may_lie_apart_and_nothing_else_is_written(rng):
    given = arguments(CASES["tiny"], rng)
    expected = run(**given)
    wide = np.full((8, 9, 40), np.nan, BF16)
    wide[:, 1:, 8:] = given["joint"]
    area = np.full((10, 9, 48), 7, BF16)
    out = qk_norm_rope(**given | dict(joint=wide[:, 1:, 8:]), out=area[1:9, :8, 8:40])
    assert out.tobytes() == expected.tobytes()
    out[...] = 7
    assert (area == 7).all()


def test_the_result_may_take_the_place_of_what_is_given(rng):
    given = arguments(CASES["tiny"], rng)
    expected = run(**given)
    assert qk_norm_rope(**given, out=given["joint"]).tobytes() == expected.tobytes()


def test_the_weights_do_not_wait_for_the_kernel_ahead():
    before, behind = make(bf16, 128).ptx("sm_90").split("griddepcontrol.wait")
    assert before.count("ld.global.v4.u32") == 2
    assert behind.count("ld.global.v4.u32") == 1


def test_what_does_not_fit_is_named(rng):
    good = arguments(CASES["tiny"], rng) | dict(out=np.empty((8, 8, 32), BF16))
    qk_norm_rope(**good)
    for change, message in (
        (dict(joint=good["joint"][..., 8:]), "joint: heads of 24, expected a multiple of 16 up to"),
        (dict(joint=good["joint"][..., ::-1]), "joint: strides"),
        (dict(queries=7), r"joint: 8 heads, expected 7 \+ 2 or more"),
        (dict(keys=-1), r"joint: 8 heads, expected 4 \+ -1 or more"),
        (dict(q_norm=good["q_norm"].astype(F32)), "q_norm: dtype float32, expected bfloat16"),
        (dict(k_norm=good["k_norm"][1:]), r"k_norm: shape \(31,\), expected \(32,\)"),
        (dict(positions=good["positions"].astype(np.int64)), "positions: dtype int64"),
        (dict(table=good["table"].astype(np.float64)), "table: dtype float64, expected float32"),
        (dict(out=good["out"][1:]), r"out: bfloat16 \(7, 8, 32\), expected bfloat16 \(8, 8, 32\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            qk_norm_rope(**good | change)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "keys_alone", "k26", "k26_keys"])
@pytest.mark.parametrize("rows", [1, 8, 65, 4096])
def test_gpu_has_the_bits_of_the_kernels_apart(name, rows, rng):
    given = to_gpu(arguments(CASES[name] | dict(T=rows), rng))
    expected = apart(**given, empty=lambda shape, dtype: to_gpu(np.zeros(shape, dtype)))
    out = to_gpu(np.zeros(given["joint"].shape, BF16))
    got = qk_norm_rope(**given, out=out)
    assert to_host(got).tobytes() == to_host(expected).tobytes()
