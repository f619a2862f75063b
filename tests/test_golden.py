"""Our tokens and logits against those of an implementation that nobody here wrote.

golden/make_golden.py made them with transformers and compressed-tensors, in float32. Where the
oracle's best token leads by more than a bound, ours must be the same token; every step is checked,
and those below the bound are counted in the report.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.engine import Engine
from ddtree_numba.sampling import SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
LINES = [json.loads(line) for line in (GOLDEN / "golden_tokens.jsonl").read_text().splitlines()]
RELATIVE = 2e-4  # float32: largest difference over largest logit
SURE = {"float32": 2e-3, "bfloat16": 0.5}  # a lead, in logits, that rounding cannot overturn
TREES = ("root", "chain", "bushy", "random", "wide")


@pytest.fixture(scope="module")
def engines(engine, embedded) -> dict[str, Engine]:
    return {"bfloat16": engine, "float32": Engine.load(embedded, backend="numpy", dtype="float32")}


def tree(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "golden_trees.npz") as arrays:
        return {f: arrays[f"{name}.{f}"] for f in ("prompt", "tokens", "parents", "logits")}


@pytest.mark.parametrize("dtype", SURE)
def test_golden_tokens_at_every_sure_step(engines, dtype: str, record_property):
    """Each step on the golden prefix, so that one near tie does not excuse the steps behind it."""
    below, turned = 0, []
    for line in LINES:
        tokens, gaps = np.array(line["tokens"]), np.array(line["gaps"])
        chain = list(range(len(tokens) - 1))
        logits = engines[dtype].logits(line["prompt_ids"], line["tokens"][:-1], chain)
        ours = logits.argmax(-1)
        sure = gaps > SURE[dtype]
        assert np.array_equal(ours[sure], tokens[sure]), line["name"]
        below += int((~sure).sum())
        turned += gaps[ours != tokens].tolist()
    steps = sum(len(line["tokens"]) for line in LINES)
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
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    tokens: list[int] = []
    for one in engines["float32"].generate([line["prompt_ids"]], params, mode, 16):
        tokens += one.token_ids
    unsure = [step for step, gap in enumerate(line["gaps"]) if gap <= SURE["float32"]]
    held = unsure[0] if unsure else 64
    assert len(tokens) == 64
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
