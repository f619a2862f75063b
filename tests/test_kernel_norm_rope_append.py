"""Norms and rotation in one launch: the bits of the kernels that it stands for, views, the law."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.arguments import bf16
from ddtree_numba.kernels.kv_append import kv_append
from ddtree_numba.kernels.norm_rope_append import make, norm_rope_append
from ddtree_numba.kernels.rms_norm import rms_norm
from ddtree_numba.kernels.rope import rope, rope_table
from ddtree_numba.spec import norm_rope_append as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CASES = {name: case | dict(T=min(case["T"], 5)) for name, case in spec.CASES.items()}
del CASES["odd"]
FIRST = 30  # position of the first row


def arguments(case, rng, dtype=BF16):
    """What the kernel takes: the table in place of the frequencies."""
    given = spec.inputs(case, rng)
    given |= {k: given[k].astype(dtype) for k in ("joint", "q_norm", "kv_norm", "scratch")}
    given["positions"] = (FIRST + np.arange(case["T"])).astype(np.int32)
    given["table"] = rope_table(FIRST + case["T"], given["inv_freq"], given["amplitude"])
    return {k: v for k, v in given.items() if k not in ("inv_freq", "amplitude")}


def run(joint, q_norm, **given):
    """(q, scratch), on numpy arrays."""
    out = np.empty((len(joint), len(q_norm)), joint.dtype)
    assert norm_rope_append(joint, q_norm, **given, out=out) is out
    return out, given["scratch"]


def apart(joint, q_norm, kv_norm, eps, positions, table, scratch, shards, empty=np.empty):
    """By the four launches: (q, scratch), and nothing of what is given is written."""
    if shards > 1:
        joint = spec.sorted_parts(joint, len(q_norm), shards)
    first, second = len(q_norm), len(q_norm) + len(kv_norm)
    q, latent, k_rope = (
        empty((len(joint), width), joint.dtype) for width in (first, second - first, table.shape[1])
    )
    rms_norm(joint[:, :first], q_norm, eps, out=q)
    rms_norm(joint[:, first:second], kv_norm, eps, out=latent)
    rope(joint[:, second:], positions, table, out=k_rope)
    rows = empty(scratch.shape, scratch.dtype)
    kv_append(latent[None], k_rope[None], rows[None])
    return q, rows


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_has_the_bits_of_the_kernels_apart(name, dtype, rng):
    given = arguments(CASES[name], rng, dtype)
    for got, expected in zip(run(**given), apart(**given), strict=True):
        assert got.dtype == dtype and got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["one_row", "tiny", "k26"])
def test_agrees_with_the_specification(name, rng):
    case = CASES[name]
    given = spec.inputs(case, rng)
    given["positions"] = FIRST + np.arange(case["T"])
    expected = spec.norm_rope_append(**given), given["scratch"]
    table = rope_table(FIRST + case["T"], given.pop("inv_freq"), given.pop("amplitude"))
    given |= dict(scratch=np.empty_like(given["scratch"]), table=table)
    got = run(**given | dict(positions=given["positions"].astype(np.int32)))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one.astype(F32), other.astype(F32), **spec.TOLERANCE)
    turned = (rows[:, case["D"] :].tobytes() for rows in (got[1], expected[1]))
    assert len(set(turned)) == 1, "the rotation is exact"


@pytest.mark.parametrize("widths", [(8, 8, 8), (1544, 776, 128), (776, 1552, 256)], ids=str)
def test_other_widths_have_the_bits_of_the_kernels_apart(widths, rng):
    """A lane each; more warps than K2.6 has, of the wide norm's shape; a whole warp that turns."""
    case = dict(T=2, **dict(zip("QDP", widths, strict=True)))
    given = arguments(case, rng)
    for got, expected in zip(run(**given), apart(**given), strict=True):
        assert got.tobytes() == expected.tobytes()


def test_s09_a_row_has_the_same_bits_alone(rng):
    given = arguments(CASES["tiny"] | dict(T=9), rng)
    q, rows = run(**given)
    for i in (0, 4, 8):
        row = slice(i, i + 1)
        part = {k: given[k][row] for k in ("joint", "positions")}
        alone = run(**given | part | dict(scratch=np.empty_like(rows[row])))
        assert alone[0].tobytes() == q[row].tobytes()
        assert alone[1].tobytes() == rows[row].tobytes()


def test_m01_a_nan_row_and_a_position_beyond_the_table_stay_by_themselves(rng):
    given = arguments(CASES["tiny"], rng)
    clean_q, clean_rows = (a.copy() for a in run(**given))
    given["joint"][1] = np.nan
    given["positions"][2], given["positions"][3] = -1, len(given["table"])
    q, rows = run(**given)
    assert np.isnan(q[1].astype(F32)).all() and np.isnan(rows[1].astype(F32)).all()
    assert np.isnan(rows[2:4, 64:].astype(F32)).all()
    assert rows[2:4, :64].tobytes() == clean_rows[2:4, :64].tobytes()
    others = [0, 4]
    assert rows[others].tobytes() == clean_rows[others].tobytes()
    assert np.delete(q, 1, 0).tobytes() == np.delete(clean_q, 1, 0).tobytes()


def test_rows_may_lie_apart_and_nothing_else_is_written(rng):
    given = arguments(CASES["tiny"], rng)
    expected = run(**given | dict(scratch=given["scratch"].copy()))
    wide = np.full((5, 200), np.nan, BF16)
    wide[:, 8:184] = given["joint"]
    area = np.full((7, 96), 7, BF16)
    q, rows = run(**given | dict(joint=wide[:, 8:184], scratch=area[1:6, 8:88]))
    assert q.tobytes() == expected[0].tobytes() and rows.tobytes() == expected[1].tobytes()
    rows[...] = 7
    assert (area == 7).all()


def test_the_weights_do_not_wait_for_the_kernel_ahead():
    before, behind = make(bf16, 1536, 512, 64).ptx("sm_90").split("griddepcontrol.wait")
    assert before.count("ld.global.v4.u32") == 3
    assert behind.count("ld.global.v4.u32") == 3 + 1


def test_what_does_not_fit_is_named(rng):
    good = arguments(CASES["tiny"], rng) | dict(out=np.empty((5, 96), BF16))
    norm_rope_append(**good)
    narrow = {k: good[k][..., 4:] for k in ("joint", "q_norm", "out")}
    for change, message in (
        (dict(joint=good["joint"][:, 8:]), r"joint: rows of 168, expected 96 \+ 64 \+ 16"),
        (dict(joint=good["joint"][:, ::-1]), "joint: strides"),
        (dict(scratch=good["scratch"][1:]), r"scratch: bfloat16 \(4, 80\), expected bfloat16"),
        (dict(scratch=good["scratch"].astype(F32)), "scratch: float32"),
        (narrow, r"joint, scratch: \(92, 64, 16\), rows 176 and 80 apart: expected multiples of 8"),
        (dict(q_norm=good["q_norm"].astype(F32)), "q_norm: dtype float32, expected bfloat16"),
        (dict(kv_norm=good["kv_norm"].astype(F32)), "kv_norm: dtype float32, expected bfloat16"),
        (dict(positions=good["positions"].astype(np.int64)), "positions: dtype int64"),
        (dict(table=good["table"].astype(np.float64)), "table: dtype float64, expected float32"),
        (dict(out=good["out"][1:]), r"out: shape \(4, 96\), expected \(5, 96\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            norm_rope_append(**good | change)
    wide = arguments(dict(T=1, Q=8, D=8, P=264), rng) | dict(out=np.empty((1, 8), BF16))
    with pytest.raises(ValueError, match="table: rows of 264, at most 256"):
        norm_rope_append(**wide)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "k26"])
@pytest.mark.parametrize("rows", [1, 17, 65, 4096])
def test_gpu_has_the_bits_of_the_kernels_apart(name, rows, rng):
    given = to_gpu(arguments(CASES[name] | dict(T=rows), rng))
    expected = apart(**given, empty=lambda shape, dtype: to_gpu(np.zeros(shape, dtype)))
    out = to_gpu(np.zeros((rows, CASES[name]["Q"]), BF16))
    got = norm_rope_append(**given, out=out), given["scratch"]
    for one, other in zip(got, expected, strict=True):
        assert to_host(one).tobytes() == to_host(other).tobytes()
