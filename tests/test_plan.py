"""The size planner against the published totals, and what tensor parallelism can divide."""

from pathlib import Path

import pytest

from ddtree_numba.model.config import CheckpointError, load_config, load_drafter_config
from ddtree_numba.model.plan import CARD_BYTES, GIB, Plan, plan, render, total
from ddtree_numba.model.sharding import check_shares, check_tp, tp_sizes
from tests.checkpoints import drafter_config, nested_config
from tests.published import k26, k26_drafter
from tests.refusals import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of K2.6 and of its drafter; no weights."""
    folder = write(tmp_path_factory.mktemp("k26"), k26())
    (folder / "drafter").mkdir()
    write(folder / "drafter", k26_drafter())
    return folder


@pytest.fixture(scope="module")
def eight(folder: Path) -> Plan:
    return plan(load_config(folder), load_drafter_config(folder / "drafter"), tp=8)


def test_published_totals(eight: Plan) -> None:
    target, drafter = total(eight.target), total(eight.drafter)
    assert (target.tensors, target.bytes) == (208_215, 594_205_904_896)
    assert target.rank_bytes == 76_182_593_536
    assert (drafter.tensors, drafter.bytes) == (69, 6_958_554_112)
    assert (eight.cache_bytes, eight.drafter_cache_bytes) == (70_272, 3_072)


def test_published_bytes_of_each_part(eight: Plan) -> None:
    parts = {part.title: part.rank_bytes for part in eight.target}
    assert parts["routed experts"] == 71_345_111_040
    assert parts["shared expert"] / GIB == pytest.approx(0.615, abs=5e-4)
    assert parts["router"] / GIB == pytest.approx(0.308, abs=5e-4)
    assert parts["attention, norms"] / GIB == pytest.approx(1.221 + 1.722, abs=2e-3)
    assert parts["dense MLP"] / GIB == pytest.approx(0.092, abs=5e-4)
    assert parts["embedding, head"] / GIB == pytest.approx(2 * 0.273, abs=1e-3)


@pytest.mark.parametrize(("reserve", "tokens"), [(6, 284_849), (8, 254_289)])
def test_published_context_of_a_card(folder: Path, reserve: int, tokens: int) -> None:
    answer = plan(load_config(folder), tp=8, reserve_bytes=reserve * GIB)
    assert pytest.approx(95.59, abs=5e-3) == CARD_BYTES / GIB
    assert answer.cache_tokens == tokens
    assert answer.context == min(tokens, 262_144)


def test_the_drafter_takes_room_from_the_cache(folder: Path, eight: Plan) -> None:
    alone = plan(load_config(folder), tp=8)
    assert alone.free_bytes - eight.free_bytes == total(eight.drafter).rank_bytes
    assert eight.cache_tokens < alone.cache_tokens


def test_a_drafter_of_another_target_is_not_planned(folder: Path, tmp_path: Path) -> None:
    other = load_drafter_config(write(tmp_path, drafter_config()))
    with pytest.raises(CheckpointError, match="hidden_size is 64, the target has 7168"):
        plan(load_config(folder), other)


def test_table_of_the_plan(folder: Path, eight: Plan) -> None:
    text = render(eight)
    for number in ("208,215", "594,205,904,896", "70.95", "73,344", "262,144", "69"):
        assert number in text
    assert max(map(len, text.splitlines())) <= 100
    assert "does not fit" not in text and "no drafter" not in text
    small = render(plan(load_config(folder), tp=1))
    assert "does not fit" in small and "no drafter" in small


def test_a_model_that_does_not_fit_has_no_context(folder: Path) -> None:
    answer = plan(load_config(folder), tp=1)
    assert answer.free_bytes < 0 and answer.cache_tokens == answer.context == 0


def test_l09_a_16_bit_config_is_not_planned_as_int4(tmp_path: Path) -> None:
    config = k26()
    del config["text_config"]["quantization_config"]
    with pytest.raises(CheckpointError, match="plain bfloat16"):
        plan(load_config(write(tmp_path, config)), tp=8)


def test_l06_divisibility(folder: Path) -> None:
    for tp in (1, 2, 4, 8):
        check_tp(load_config(folder), tp, load_drafter_config(folder / "drafter"))
    check_shares([("moe_intermediate_size", 2048, 32)], 8)


@pytest.mark.parametrize(
    ("name", "size", "unit", "tp", "words"),
    [
        ("moe_intermediate_size", 1408, 128, 8, ["1408", "tp 8", "176", "128", "works: 1, 11"]),
        ("moe_intermediate_size", 96, 32, 2, ["96", "tp 2", "48", "32", "works: 1, 3"]),
        ("moe_intermediate_size", 100, 32, 1, ["100", "32", "works: none"]),
        ("num_attention_heads", 64, 1, 3, ["64", "tp 3", "21.3", "works: 1, 2, 4, 8, 16, 32, 64"]),
        ("vocab_size", 163_841, 1, 8, ["163841", "tp 8", "works: 1, 163841"]),
    ],
)
def test_l06_message_has_dimension_tp_unit_and_sizes_that_work(name, size, unit, tp, words) -> None:
    with pytest.raises(CheckpointError) as error:
        check_shares([(name, size, unit)], tp)
    message = str(error.value)
    assert "\n" not in message and name in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("tp", [0, -1, 2.0, True, "2", None])
def test_l06_tp_that_is_no_number_of_ranks(folder: Path, tp: object) -> None:
    with pytest.raises(CheckpointError, match="tp must be"):
        check_tp(load_config(folder), tp)  # type: ignore[arg-type]


def test_l06_the_drafter_is_checked_too(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="drafter num_key_value_heads 8 / tp 16"):
        check_tp(load_config(folder), 16, load_drafter_config(folder / "drafter"))
    check_tp(load_config(folder), 16)


def test_l06_tp_sizes_are_common_divisors(tmp_path: Path) -> None:
    assert tp_sizes([("a", 64, 1), ("b", 96, 32), ("c", 12, 1)]) == [1]
    assert tp_sizes([("a", 64, 1), ("b", 128, 32), ("c", 12, 1)]) == [1, 2, 4]
    config = nested_config()
    config["text_config"]["vocab_size"] = 129
    with pytest.raises(CheckpointError, match="vocab_size 129 / tp 2 .* works: 1$"):
        plan(load_config(write(tmp_path, config)), tp=2)
