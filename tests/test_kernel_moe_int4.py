"""The expert kernels on the CPU executor: every way of the block, the law, what is refused."""

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels import driver, moe_records, moe_sliced, moe_tiles, moe_wide
from ddtree_numba.kernels import moe_int4 as kernels
from ddtree_numba.kernels.moe_int4 import moe_int4, workspace
from ddtree_numba.kernels.moe_records import records_shape
from ddtree_numba.spec import moe_int4 as spec
from ddtree_numba.spec.numerics import BF16, F32, Int4Matrix, bf16, dequantize_int4, pack_int4
from tests.cases import small
from tests.expert_records import on_device, packed, part, run, sums
from tests.machine_code import before_the_wait

WAYS = dict(direct=(1000, 4), narrow=(0, 100), wide=(0, 0))  # DIRECT, BUSY that bring it about
SIZES = dict(T=4, k=2, E=3, H=128, I=64, base=True)
CASES = {name: spec.CASES[name] for name in small(spec.CASES)}
CASES["mostly_empty"] |= dict(H=64, E=20, T=2)
CASES["tiny"] |= dict(T=1, k=2, E=3, I=64)  # a quarter of the embedded model's columns
CASES["an_eighth"] = CASES["tiny"] | dict(I=32)
for way in WAYS:
    CASES[way] = SIZES | dict(way=way)


@pytest.fixture
def take(monkeypatch):
    """take(way): the kernels that other numbers of pairs would bring about."""

    def take(way):
        direct, busy = WAYS[way]
        monkeypatch.setattr(kernels, "DIRECT", direct)
        monkeypatch.setattr(kernels, "BUSY", busy)

    return take


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_specification(name, rng, take):
    given = spec.inputs(CASES[name], rng)
    if "way" in CASES[name]:
        take(CASES[name]["way"])
    out = run(**on_device(given)).astype(F32)
    np.testing.assert_allclose(out, spec.moe_int4(**given).astype(F32), **spec.TOLERANCE)


def test_e08_a_row_has_the_same_bits_alone_and_in_any_company(rng, take, monkeypatch):
    """A pair a tile, tiles of 8, of 32, all of them one block's; alone, shuffled, crowded."""
    monkeypatch.setattr(kernels, "_resident", lambda *_: 1)
    given = on_device(spec.inputs(SIZES | dict(T=3, H=64, I=32), rng))
    given["experts"] = np.array([[0, 1], [0, 2], [2, 0]], np.int32)  # 3, 1 and 2 pairs
    together = run(**given)
    for rows in ([0], [2, 1]):
        assert run(**part(given, rows)).tobytes() == together[rows].tobytes()
    crowd = given["experts"].copy()
    crowd[1:] = crowd[0]  # everybody joins the first token's experts
    for way in ("narrow", "wide"):
        take(way)
        assert run(**given).tobytes() == together.tobytes()
        assert run(**given | {"experts": crowd})[0].tobytes() == together[0].tobytes()


def test_e08_the_order_of_the_sums_is_the_weights_alone(rng, monkeypatch):
    """Before h is rounded, which would hide it: 8 slices of 16 records, whatever the tile."""
    given = on_device(spec.inputs(dict(T=2, k=1, E=1, H=1024, I=32), rng))
    x, experts, gate_up = given["x"], given["experts"], given["gate_up"]
    direct = moe_sliced.make(16, True, direct=True, raw=True)
    expected = sums(direct, 0, x, experts, gate_up, tiles=4)
    narrow = moe_sliced.Schedule(rows=1, records=1, ring=3)
    for program, width in (
        (moe_sliced.make(16, True, schedule=narrow, raw=True), 8),
        (moe_wide.make(16, True, raw=True), 32),
    ):
        found = sums(program, width, x, experts, gate_up, tiles=4)
        assert found.tobytes() == expected.tobytes()
    alone = sums(direct, 0, x[1:], experts[1:], gate_up, tiles=4)
    assert alone.tobytes() == expected[1].tobytes()
    monkeypatch.setattr(moe_sliced, "slices", lambda depth: 2)
    other = moe_sliced.make.__wrapped__(16, True, direct=True, raw=True)
    assert sums(other, 0, x, experts, gate_up, tiles=4).tobytes() != expected.tobytes()  # control


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_rows_of_down_of_any_length(depth, rng):
    """float32 products at every number of ranks, every way, against a dense product."""
    matrix = spec.random_int4(2, 64, 64 * depth, rng)
    hidden = rng.standard_normal((2, 64 * depth)).astype(BF16)
    experts = np.array([[1], [1]], np.int32)
    records = packed(matrix, False)
    weights = dequantize_int4(matrix.packed, matrix.scale, matrix.shape).astype(float)
    rows = zip(experts, hidden.astype(float), strict=True)
    expected = np.stack([weights[e] @ h for (e,), h in rows])
    found = []
    for way in (kernels.UNGROUPED, 8, 32)[: 2 if depth == 16 else 3]:
        _, down = kernels.programs(depth, depth, 4, way)
        found.append(sums(down, way, hidden, experts, records))
        np.testing.assert_allclose(found[-1], expected, rtol=1e-5, atol=1e-5)
    assert all(each.tobytes() == found[0].tobytes() for each in found)


def test_products_by_parts_have_the_same_bits(rng, monkeypatch, take):
    """All columns of y at once, and 256 at a time."""
    given = on_device(spec.inputs(dict(T=1, k=1, E=1, H=320, I=32), rng))
    take("narrow")
    whole = run(**given)
    monkeypatch.setattr(kernels, "MOST_PRODUCTS", 1)
    assert run(**given).tobytes() == whole.tobytes()


def test_e08_picks_are_summed_in_their_order():
    """Weights 1, 2^30, -2^30 over equal experts: only the order says whether the 1 survives."""
    one = np.zeros((3, 64, 64), np.int8)
    one[:, [0, 32], 0] = 1  # gate and up read x[0]
    gate_up = Int4Matrix(pack_int4(one), bf16(np.ones((3, 64, 2))), (64, 64))
    down = Int4Matrix(pack_int4(one[..., :32]), bf16(np.ones((3, 64, 1))), (64, 32))
    x = np.zeros((1, 64), BF16)
    x[0, 0] = 32  # silu(32) is 32
    given = dict(gate_up=packed(gate_up, True), down=packed(down, False), x=x)

    def total(shares, experts):
        shares, experts = np.array([shares], F32), np.array([experts], np.int32)
        return float(run(experts=experts, weights=shares, **given)[0, 0]) / 1024

    big = 2.0**30
    assert total([1, big, -big], [0, 1, 2]) == total([1, big, -big], [2, 1, 0]) == 0
    assert total([big, -big, 1], [0, 1, 2]) == total([big, -big, 1], [2, 0, 1]) == 1


@pytest.mark.parametrize("way", WAYS)
def test_m01_padding_picks_read_nothing(way, rng, take):
    """-1 and ids beyond the last: neither their weights nor what their rows hold is looked at."""
    given = spec.inputs(SIZES | dict(T=4, H=64, I=32), rng)
    given["experts"][-2:], given["experts"][0, 1:] = -1, -1
    expected = spec.moe_int4(**given | {"base": None}).astype(F32)
    given["experts"][-1:], given["base"] = 3, None
    given["x"][-2:], given["weights"][-2:], given["weights"][0, 1:] = np.nan, np.nan, np.nan
    take(way)
    out = run(**on_device(given)).astype(F32)
    np.testing.assert_allclose(out, expected, **spec.TOLERANCE)
    assert not out[-2:].any()


def test_e01_pairs_are_grouped_for_any_number_of_experts(rng):
    sizes = (1, 8, 33, 1), (12, 8, 97, 5), (12, 32, 300, 1), (384, 32, 300, 1), (1000, 8, 20, 1)
    for experts, width, count, blocks in sizes:  # of five blocks one is left without experts
        picked = rng.integers(-1, experts, count).astype(np.int32)
        items = moe_tiles.most_tiles(count, experts, width)
        plan, pairs = np.empty(1 + items, np.int32), np.empty(items * width, np.int32)
        program = moe_tiles.make(width)
        program.launch(blocks, picked, plan, pairs, count, experts)
        entries = plan[1 : 1 + plan[0]]
        found = [
            (entry & 0xFFFF, pairs[j * width : j * width + (entry >> 16)])
            for j, entry in enumerate(entries)
        ]
        assert sorted(np.concatenate([p for _, p in found])) == list(np.flatnonzero(picked >= 0))
        assert all((picked[mine] == e).all() and len(mine) for e, mine in found)
        counts = np.bincount(picked[picked >= 0], minlength=experts)[entries & 0xFFFF]
        order = np.minimum(-(-counts // 8), width // 8) * -1000 + (entries & 0xFFFF)
        assert (np.diff(order) >= 0).all()
        assert len(found) == sum(-(-int((picked == e).sum()) // width) for e in range(experts))


def test_e08_a_block_groups_its_pairs_by_itself(rng):
    """All to one expert fill several tiles; none at all; repeated and padding picks."""
    for experts in (np.full((32, 1), 2), np.array([[2, 2, 1, -1]] * 3), np.full((3, 1), -1)):
        given = spec.inputs(SIZES | dict(T=len(experts), k=1, H=64, I=32), rng)
        given["experts"] = experts.astype(np.int32)
        given["weights"] = np.ones(experts.shape, F32)
        out = run(**on_device(given)).astype(F32)
        np.testing.assert_allclose(out, spec.moe_int4(**given).astype(F32), **spec.TOLERANCE)


# --- what is refused, and sizes


@pytest.mark.parametrize("way", [kernels.UNGROUPED, 8, 32])
def test_blocks_fit_beside_each_other(way):
    """As many as their schedule says, in what an H200 has at the driver's division of L1."""
    for program in kernels.programs(112, 4, 448, way):
        block = program.kernel.shared_bytes + driver.RESERVED
        assert program.blocks * block <= 164 << 10, program.kernel.name


def test_weights_of_down_do_not_wait_for_the_kernel_ahead(tmp_path):
    """In the machine code: all but one of the ring's stages, of five or nine copies each."""
    for way, count in ((kernels.UNGROUPED, 10), (8, 15), (32, 18)):
        _, down = kernels.programs(112, 4, 448, way)
        assert before_the_wait(down.kernel, tmp_path).count("LDGSTS") == count


def test_one_workspace_serves_fewer_rows():
    for count, size in ((384, (7168, 256)), (12, (192, 256))):
        words = np.broadcast_to(np.uint32(0), records_shape(count, size, False))
        down = moe_records.Records(words, size, False)
        most = kernels._sizes(4096 * 8, down)
        for rows in (1, 4, 5, 129, 146, 147, 300, 1024, 2047, 4095):
            sizes = kernels._sizes(rows * 8, down)
            assert all(a <= b for a, b in zip(sizes, most, strict=True)), rows


def test_what_does_not_fit_is_named(rng):
    given = on_device(spec.inputs(SIZES | dict(T=2, H=64, I=32), rng))
    with pytest.raises(ValueError, match="do not fit rows"):
        run(**given | {"down": given["gate_up"]})
    with pytest.raises(ValueError, match=r"weights: shape \(1, 2\), expected \(2, 2\)"):
        run(**given | {"weights": given["weights"][:1]})
    with pytest.raises(ValueError, match="experts: dtype int64, expected int32"):
        run(**given | {"experts": given["experts"].astype(np.int64)})
    with pytest.raises(ValueError, match="x: dtype float32, expected bfloat16"):
        run(**given | {"x": given["x"].astype(F32)})
    space = workspace(1, 2, given["down"], np.empty)
    with pytest.raises(ValueError, match="workspace: too small for 2 rows of 2 picks"):
        moe_int4(**given, workspace=space, out=np.empty_like(given["x"]))
    for shape, gated, message in (
        ((64, 96), True, "hidden size is no multiple of 64"),
        ((96, 32), False, "hidden size is no multiple of 64"),
        ((64, 48), False, "inner size is no multiple of 32"),
        ((48, 64), True, "inner size is no multiple of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            records_shape(1, shape, gated)
