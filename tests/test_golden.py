"""Our tokens and logits against those of an implementation that nobody here wrote.

golden/make_golden.py made them with transformers and compressed-tensors, in float32. Where the
oracle's best token leads by more than a bound, ours must be the same token; every step is checked,
and those below the bound are counted in the report.
"""

import numpy as np
import pytest

from ddtree_numba.engine import Engine
from tests.answers import GOLDEN, LINES, TOKENS, decode, sampling

RELATIVE = 2e-4  # float32: largest difference over largest logit
SURE = {"float32": 2e-3, "bfloat16": 0.5}  # a lead, in logits, that rounding cannot overturn
TREES = ("root", "chain", "bushy", "random", "wide")


@pytest.fixture(scope="module")
def engines(engine, embedded) -> dict[str, Engine]:
    return {"bfloat16": engine, "float32": Engine.load(embedded, backend="numpy", dtype="float32")}


def tree(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "golden_trees.npz") as arrays:
        return {f: arrays[f"{name}.{f}"] for f in ("prompt", "tokens", "parents", "logits")}


def check_steps(engine: Engine, lines: list[dict], bound: float) -> tuple[int, int, list[float]]:
    """(steps, those that lead by `bound` or less, the leads of those that turned).

    Each step on the golden prefix, so that one near tie does not excuse the steps behind it.
    """
    steps, below, turned = 0, 0, []
    for line in lines:
        tokens, gaps = np.array(line["tokens"]), np.array(line["gaps"])
        chain = list(range(len(tokens) - 1))
        ours = engine.logits(line["prompt_ids"], line["tokens"][:-1], chain).argmax(-1)
        sure = gaps > bound
        assert np.array_equal(ours[sure], tokens[sure]), line["name"]
        steps, below = steps + len(tokens), below + int((~sure).sum())
        turned += gaps[ours != tokens].tolist()
    return steps, below, turned


@pytest.mark.parametrize("dtype", SURE)
def test_golden_tokens_at_every_sure_step(engines, dtype: str, record_property):
    steps, below, turned = check_steps(engines[dtype], LINES, SURE[dtype])
    record_property(
        "summary",
        f"golden tokens, {dtype}: {steps} steps, {below} lead by {SURE[dtype]} or less, of which "
        f"{len(turned)} turned (largest lead turned {max(turned, default=0):.3f})",
    )
    assert steps >= 32 * 64 and below < steps / 5


@pytest.mark.parametrize("mode", ["ddtree", "ar"])
@pytest.mark.parametrize("line", LINES[::4], ids=lambda line: line["name"])
def test_golden_tokens_are_generated(engines, line: dict, mode: str):
    """Free running in float32, up to the first step that is not sure."""
    (tokens,) = decode(engines["float32"], [line["prompt_ids"]], sampling(None), mode, 16)
    unsure = [step for step, gap in enumerate(line["gaps"]) if gap <= SURE["float32"]]
    held = unsure[0] if unsure else TOKENS
    assert len(tokens) == TOKENS
    assert tokens[:held] == line["tokens"][:held]


@pytest.mark.parametrize("name", TREES)
def test_golden_tree_logits(engines, name: str, record_property):
    golden = tree(name)
    nodes = (golden["prompt"].tolist(), golden["tokens"].tolist(), golden["parents"].tolist())
    scale = np.abs(golden["logits"]).max()
    error = {
        dtype: np.abs(one.logits(*nodes) - golden["logits"]).max() / scale
        for dtype, one in engines.items()
    }
    record_property(
        "summary",
        f"golden tree {name}: largest difference over largest logit "
        f"{error['float32']:.1e} in float32, {error['bfloat16']:.1e} in bfloat16",
    )
    assert error["float32"] < RELATIVE
    assert error["bfloat16"] < 0.2  # rounding may turn a router's near tie, and with it an expert


def test_a_wrong_mask_would_show(engines):
    """The tree's nodes run as one chain are far from the golden logits."""
    golden = tree("random")
    tokens = golden["tokens"].tolist()
    chain = engines["float32"].logits(golden["prompt"].tolist(), tokens, list(range(len(tokens))))
    assert np.abs(chain - golden["logits"]).max() > 100 * RELATIVE * np.abs(golden["logits"]).max()
