"""Product and rotation of queries in one launch: the bits of the kernels apart, views, the law."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.absorb import FEW, absorb
from ddtree_numba.kernels.absorb_rope import absorb_rope
from ddtree_numba.kernels.rope import rope, rope_table
from ddtree_numba.spec import absorb_rope as spec
from ddtree_numba.spec.numerics import BF16, F32
from tests.gpu_arrays import to_gpu, to_host

CASES = {k: case for k, case in spec.CASES.items() if k not in ("odd", "k26")}
CASES |= dict(
    queries=dict(T=9, h=2, a=128, b=128, P=64),
    lanes_left_over=dict(T=3, h=1, a=8, b=8, P=24),
)
FIRST = 30  # position of the first row


def arguments(case, rng):
    """What the kernel takes: the table in place of the frequencies."""
    given = spec.inputs(case, rng)
    given["positions"] = (FIRST + np.arange(case["T"])).astype(np.int32)
    table = rope_table(FIRST + case["T"], given.pop("inv_freq"), given.pop("amplitude"))
    return given | dict(table=table)


def empty(q, weight, table):
    return np.empty((*q.shape[:2], weight.shape[2] + table.shape[1]), BF16)


def run(q, weight, positions, table):
    out = empty(q, weight, table)
    assert absorb_rope(q, weight, positions, table, out=out) is out
    return out


def apart(q, weight, positions, table, out):
    """By the two launches."""
    _, ins, outs = weight.shape
    absorb(q[..., :ins], weight, out=out[..., :outs])
    rope(q[..., ins:], positions, table, out=out[..., outs:])
    return out


@pytest.mark.parametrize("name", CASES)
def test_has_the_bits_of_the_kernels_apart_and_agrees_with_the_specification(name, rng):
    given = spec.inputs(CASES[name], rng)
    given["positions"] = (FIRST + np.arange(len(given["q"]))).astype(np.int32)
    expected = spec.absorb_rope(**given)
    table = rope_table(FIRST + len(given["q"]), given.pop("inv_freq"), given.pop("amplitude"))
    got = run(**given, table=table)
    assert got.tobytes() == apart(**given, table=table, out=np.empty_like(got)).tobytes()
    np.testing.assert_allclose(got.astype(F32), expected.astype(F32), **spec.TOLERANCE)


@pytest.mark.parametrize("rows", [FEW, FEW + 1, 8 * FEW + 1])
def test_blocks_of_few_and_of_many_tokens_turn_them_all(rows, rng):
    given = arguments(dict(T=rows, h=1, a=8, b=8, P=64), rng)
    got = run(**given)
    assert got.tobytes() == apart(**given, out=np.empty_like(got)).tobytes()


def test_s09_a_row_and_a_head_have_the_same_bits_alone(rng):
    given = arguments(CASES["tiny"] | dict(T=10, h=2), rng)
    together = run(**given)
    for i in (0, 8, 9):
        alone = {k: given[k][i : i + 1] for k in ("q", "positions")}
        assert run(**given | alone).tobytes() == together[i].tobytes()
    head = dict(q=np.ascontiguousarray(given["q"][:, 1:]), weight=given["weight"][1:])
    assert run(**given | head).tobytes() == together[:, 1:].tobytes()


def test_m01_a_nan_row_and_a_position_beyond_the_table_stay_by_themselves(rng):
    given = arguments(CASES["one_head"], rng)
    clean = run(**given)
    given["q"][1] = np.nan
    given["positions"][2], given["positions"][3] = -1, len(given["table"])
    out = run(**given)
    assert np.isnan(out[1].astype(F32)).all() and np.isnan(out[2:4, :, 40:].astype(F32)).all()
    assert out[2:4, :, :40].tobytes() == clean[2:4, :, :40].tobytes()
    assert out[[0, 4]].tobytes() == clean[[0, 4]].tobytes()


def test_rows_may_lie_apart_and_nothing_else_is_written(rng):
    given = arguments(CASES["one_head"], rng)
    expected = run(**given)
    wide = np.full((5, 1, 96), np.nan, BF16)
    wide[..., 8:88] = given["q"]
    area = np.full((5, 2, 64), 7, BF16)
    out = area[:, 1:, 8:56]
    absorb_rope(**given | dict(q=wide[..., 8:88]), out=out)
    assert np.ascontiguousarray(out).tobytes() == expected.tobytes()
    out[...] = 7
    assert (area == 7).all()


def test_what_does_not_fit_is_named(rng):
    given = arguments(CASES["one_head"], rng)
    good = given | dict(out=empty(given["q"], given["weight"], given["table"]))
    for change, message in (
        (dict(q=good["q"][..., 8:]), r"q: shape \(5, 1, 72\), expected \(5, 1, 80\)"),
        (dict(q=good["q"].astype(F32)), "q: dtype float32, expected bfloat16"),
        (dict(out=good["out"][..., 8:]), r"out: shape \(5, 1, 40\), expected \(5, 1, 48\)"),
        (dict(weight=good["weight"].astype(F32)), "weight: dtype float32, expected bfloat16"),
        (dict(positions=good["positions"][1:]), r"positions: shape \(4,\), expected \(5,\)"),
        (dict(positions=good["positions"].astype(np.int64)), "positions: dtype int64"),
        (dict(table=good["table"].astype(np.float64)), "table: dtype float64, expected float32"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            absorb_rope(**good | change)
    wide = arguments(dict(T=1, h=1, a=8, b=8, P=264), rng)
    with pytest.raises(ValueError, match="table: rows of 264, expected a multiple of 8, at most"):
        run(**wide)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "k26"])
@pytest.mark.parametrize("rows", [1, 9, 65, 129, 4096])
def test_gpu_has_the_bits_of_the_kernels_apart(name, rows, rng):
    given = arguments(spec.CASES[name] | dict(T=rows), rng)
    shape, given = empty(given["q"], given["weight"], given["table"]).shape, to_gpu(given)
    got = to_host(absorb_rope(**given, out=to_gpu(np.zeros(shape, BF16))))
    expected = to_host(apart(**given, out=to_gpu(np.zeros(shape, BF16))))
    assert got.tobytes() == expected.tobytes()
