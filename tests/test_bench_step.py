"""The bench of a whole rank: its floors, weights and routing, and one small run of each kind."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from bench import bench_step, step_floor, step_routing
from bench.step_rank import Block, RandomWeights, build, read_configs
from ddtree_numba.model.backend import NumpyBackend
from ddtree_numba.model.config import load_config, load_drafter_config
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.loader import load_drafter, load_target
from ddtree_numba.model.names import target_pieces
from ddtree_numba.model.plan import plan
from ddtree_numba.spec.numerics import BF16, Int4Matrix
from tests import fake_cupy

H200 = 4.8e12, 989e12  # nominal


@pytest.fixture(scope="module")
def k26():
    return read_configs(None, 8, None)


def floor(config, rows: int, context: int = 8192) -> float:
    distinct = 384 * (1 - (1 - 8 / 384) ** rows)
    return 1e3 * sum(step_floor.verify(config, 8, rows, context, distinct, H200).values())


def test_floors_of_k26_by_another_computation(k26):
    """The figures are from a script of its own, at the nominal rates of an H200."""
    config, drafter = k26
    assert [round(floor(config, rows), 3) for rows in (1, 9, 17)] == [1.376, 3.632, 5.577]
    parts = step_floor.verify(config, 8, 1, 8192, 8.0, H200)
    fixed = parts["projections"] + parts["router_shared"] + parts["dense_head"]
    assert fixed * H200[0] / 1e9 == pytest.approx(4.54, abs=0.005)
    assert parts["experts"] * H200[0] / 1e9 == pytest.approx(1.49, abs=0.005)
    assert parts["attention"] * H200[0] / 1e9 == pytest.approx(61 * 8192 * 1152 / 1e9)
    drafted = step_floor.draft(config, drafter, 8, 0, H200) * H200[0]
    assert drafted == pytest.approx(6_958_554_112 / 8 + 163840 * 7168 / 8 * 2, rel=1e-3)


def test_many_rows_are_bound_by_operations(k26):
    parts = step_floor.verify(k26[0], 8, 4096, 0, 384.0, H200)
    experts = 60 * 2 * 3 * 7168 * 256 * 384 * 88 / H200[1]  # 85.3 rows an expert, in eights
    assert parts["experts"] == pytest.approx(experts)


class Shapes:
    """A backend that keeps of every weight its bytes alone; device memory is never touched."""

    xp = np

    def __init__(self):
        self.bytes = 0

    def active(self):
        return NumpyBackend().active()

    def place(self, tensor, field):
        parts = (tensor.packed, tensor.scale) if isinstance(tensor, Int4Matrix) else (tensor,)
        self.bytes += sum(part.nbytes for part in parts)


def test_a_full_rank_of_k26_takes_the_bytes_of_the_plan(k26, monkeypatch):
    from ddtree_numba.model.loader import target_weights

    monkeypatch.setattr(Block, "array", lambda self, shape: np.empty(shape, self.dtype))
    ops = Shapes()
    target_weights(RandomWeights(target_pieces(k26[0]), 8, ops), k26[0])
    assert ops.bytes == sum(part.rank_bytes for part in plan(k26[0], tp=8).target)
    assert ops.bytes < 77e9  # of 141 GB, or of 102 GB


def leaves(weights):
    for field in dataclasses.fields(weights):
        value = getattr(weights, field.name)
        for each in value if isinstance(value, tuple) and field.name == "layers" else [value]:
            if dataclasses.is_dataclass(each) and not isinstance(each, Int4Matrix):
                yield from leaves(each)
            elif isinstance(each, Int4Matrix):
                yield each.packed.shape, each.scale.shape, each.shape
            else:
                yield each.shape, each.dtype


def test_weights_have_the_shapes_of_loaded_ones(embedded):
    config, drafter = load_config(embedded), load_drafter_config(embedded / "drafter")
    ranks, _ = build(NumpyBackend(), config, drafter, 2, 100, 9)
    rank = ranks.ranks[0]
    loaded = load_target(embedded, config, 0, 2), load_drafter(embedded / "drafter", drafter, 0, 2)
    for made, wanted in zip((rank.target.weights, rank.drafter.weights), loaded, strict=True):
        assert list(leaves(made)) == list(leaves(wanted))


def test_a_block_is_repeated_from_where_it_ended():
    block = Block(np, np.arange(5, dtype=np.int32))
    assert block.array((2, 2)).tolist() == [[0, 1], [2, 3]]
    assert block.array((13,)).tolist() == [4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert block.array((2,)).tolist() == [2, 3]


@pytest.mark.parametrize("wanted", [None, 0.12, 0.26, 0.38])
def test_routing_has_the_overlap_that_was_asked_for(wanted):
    experts, picks = 384, 8
    bias, share = step_routing.correction(experts, picks, wanted)
    assert share.sum() == pytest.approx(picks)
    weights = np.full((9, picks), 0.125, np.float32)
    ops = SimpleNamespace(router=lambda *given: (None, weights), array=lambda host: host)
    drawn = step_routing.Drawn(ops, 16, picks, bias)
    given = [drawn(np.zeros((9, 4))) for _ in range(32)]
    picked = [experts for experts, _ in given]
    assert all(one is weights for _, one in given)
    assert all(a is b for a, b in zip(picked[:16], picked[16:], strict=True)), "layer by layer"
    used, overlap = step_routing.statistics(picked[:16])
    assert overlap == pytest.approx(wanted or picks / experts, rel=0.15, abs=0.005)
    assert used == pytest.approx(step_routing.distinct(share, 9), rel=0.05)


@pytest.mark.parametrize("overlap", [0.001, 1.0])
def test_an_overlap_that_cannot_be_is_refused(overlap):
    with pytest.raises(ValueError, match="overlap must be from 0.021"):
        step_routing.correction(384, 8, overlap)


def options(embedded, *more: str):
    given = ["--config", str(embedded), "--tp", "1", "--layers", "3", *more]
    return bench_step.parser().parse_args(given)


def test_a_run_on_numpy(embedded, capsys):
    given = ["--config", str(embedded), "--tp", "1", "--layers", "3", "--backend", "numpy"]
    assert bench_step.main([*given, "--tokens", "1,5", "--contexts", "100"]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.err)["rows"]
    assert [row["tokens"] for row in rows] == [1, 5] and "experts (expected)" in shown.out
    assert rows[0]["distinct"] == 4 and 4 < rows[1]["distinct"] <= 12
    assert all(row["seconds"]["round"] > 0 for row in rows)


def test_a_wrong_option_is_one_line(embedded, capsys):
    assert bench_step.main(["--config", str(embedded / "none"), "--backend", "numpy"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert bench_step.main(["--tp", "3", "--backend", "numpy"]) == 1
    assert "tp that works" in capsys.readouterr().err


def test_every_kernel_of_a_verify_forward_is_in_the_breakdown(embedded):
    with fake_cupy.installed():
        from ddtree_numba.model.cuda_backend import CudaBackend

        given = options(embedded, "--tokens", "1,9", "--contexts", "1000", "--rounds", "3")
        result = bench_step.run(given, CudaBackend(), H200, lambda text: None)
    one, nine = result["rows"]
    assert one["seconds"]["round"] == one["seconds"]["verify"] == 1e-3
    kernels = {(each["name"], each["grid"]): each["launches"] for each in nine["kernels"]}
    assert len(kernels) == len(nine["kernels"])
    for start, launches in (("tree_attention", 3), ("attention_merge", 3), ("router_sums", 2)):
        assert sum(n for (name, _), n in kernels.items() if name.startswith(start)) == launches
    text = bench_step.breakdown(nine)
    assert f"its {sum(kernels.values())} kernels by name" in text
    assert all(name in text for name, _ in kernels)


# --- m07: index widths at real size


@pytest.mark.gpu
@pytest.mark.slow
def test_m07_a_cache_of_more_than_2_31_numbers_gives_the_same_bits():
    """Two layers of K2.6, one rank of 8, 8.6 GB of pages: the last ones, then few by themselves."""
    from ddtree_numba.model.cuda_backend import CudaBackend

    config, drafter = read_configs(None, 8, 2)
    positions = (2**31 // 576 + 64) // 64 * 64
    ops = CudaBackend()
    ranks, table = build(ops, config, drafter, 8, 3000, 9)
    rank = ranks.ranks[0]
    small = rank.cache.pages
    pages = -(-positions // 64)
    assert pages * 64 * 576 > 2**31
    large = ops.zeros((2, pages, 64, 576))
    with ops.active():
        ops.copy(small, large[:, -small.shape[1] :])
    batch = partial(VerifyInput.of_chain, np.arange(1, 10, dtype=np.int32), 3000)

    def logits(pages, table):
        rank.cache.pages = pages
        before = ops.host(ranks.verify(batch(table), False))
        path = np.arange(9, dtype=np.int32)[None]
        ranks.commit(np.array([3000], np.int32), path, np.array([9], np.int32), table)
        after = VerifyInput.of_chain(np.arange(20, 29, dtype=np.int32), 3009, table)
        return before.tobytes(), ops.host(ranks.verify(after, False)).tobytes()

    moved = table + np.int32(pages - small.shape[1])
    assert moved.max() * 64 * 576 > 2**31 - 64 * 576
    assert logits(large, moved) == logits(small, table)


@pytest.mark.gpu
@pytest.mark.slow
def test_m07_experts_of_more_than_2_31_words_give_the_same_bits(k26, rng):
    """640 experts, unsplit, 15 GB: the last eight, then the same as the first eight."""
    import cupy

    from ddtree_numba.model.cuda_backend import CudaBackend

    ops = CudaBackend()
    config = dataclasses.replace(k26[0], n_routed_experts=640, num_hidden_layers=2)
    weights = RandomWeights(target_pieces(config), 1, ops)
    gate_up, down = (weights.int4(f"layers.1.mlp.{name}") for name in ("gate_up", "down"))
    assert gate_up.words.size > 2**31
    for rows in (1, 9, 65):
        x = ops.array(rng.standard_normal((rows, 7168), np.float32).astype(BF16))
        picks = np.argsort(rng.random((rows, 8)), axis=1).astype(np.int32)
        shares = ops.array(rng.random((rows, 8), np.float32))
        with ops.active():
            far = ops.host(ops.moe_int4(x, ops.array(picks + 632), shares, gate_up, down))
            first = [
                dataclasses.replace(each, words=cupy.array(each.words[-8:]))
                for each in (gate_up, down)
            ]
            near = ops.host(ops.moe_int4(x, ops.array(picks), shares, *first))
        assert far.tobytes() == near.tobytes()
