"""The golden files: they belong to the embedded checkpoint, and the oracle still produces them."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddtree_numba.spec.numerics import dequantize_int4, widen
from golden import make_golden

STEPS = 64
SURE_GAP = 1e-3  # logits of two float32 programs differ by about 1e-5: such a lead cannot flip
LOGIT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
YARN_ORIGINAL = 256  # positions beyond it are those that YaRN extends to


def golden_lines() -> list[dict]:
    return [json.loads(line) for line in make_golden.TOKENS.read_text().splitlines()]


@pytest.fixture(scope="module")
def trees() -> dict[str, dict[str, np.ndarray]]:
    """shape -> its arrays prompt, tokens, parents, logits."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(make_golden.TREES) as arrays:
        for name in arrays.files:
            shape, field = name.split(".")
            found.setdefault(shape, {})[field] = arrays[name]
    return found


@pytest.fixture(scope="session")
def oracle(embedded):
    for package in ("torch", "transformers", "compressed_tensors"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install '.[oracle]'")
    from golden.oracle import Oracle

    return Oracle(embedded)


def test_golden_files_were_made_from_this_checkpoint():
    made_from = json.loads(make_golden.PROVENANCE.read_text())
    now = make_golden.provenance()
    assert made_from.pop("versions").keys() >= {"torch", "transformers", "compressed-tensors"}
    now.pop("versions")
    assert made_from == now, "run golden/make_golden.py"


def test_golden_prompts_are_tokenized_as_the_command_does():
    prompts, lines = make_golden.read_prompts(), golden_lines()
    assert [line["name"] for line in lines] == [prompt["name"] for prompt in prompts]
    for line, prompt in zip(lines, prompts, strict=True):
        assert line["prompt_ids"] == prompt["prompt_ids"], line["name"]


def test_golden_prompts_cover_what_they_should():
    prompts = make_golden.read_prompts()
    assert len(prompts) >= 32
    assert {prompt["chat"] for prompt in prompts} == {True, False}
    assert any(not prompt["text"].isascii() for prompt in prompts)
    assert any(len(prompt["prompt_ids"]) > YARN_ORIGINAL for prompt in prompts)


def test_golden_tokens_are_complete():
    for line in golden_lines():
        assert len(line["tokens"]) == len(line["gaps"]) == STEPS, line["name"]
        assert all(0 <= gap < np.inf for gap in line["gaps"]), line["name"]


def test_golden_trees_are_trees(trees):
    assert {shape: len(tree["logits"]) for shape, tree in trees.items()} == make_golden.TREE_SIZES
    for tree in trees.values():
        children = list(zip(tree["parents"].tolist(), tree["tokens"].tolist(), strict=True))
        assert len(set(children)) == len(children), "two siblings with one token"
        assert all(parent <= node for node, (parent, _) in enumerate(children))
        assert tree["logits"].dtype == np.float32 and np.isfinite(tree["logits"]).all()


@pytest.mark.oracle
def test_oracle_computes_with_the_published_weights(oracle, embedded):
    stored: dict[str, np.ndarray] = {}
    for shard in sorted(embedded.glob("*.safetensors")):
        stored |= load_file(shard)
    stored = {name.removeprefix("language_model."): array for name, array in stored.items()}

    def projection(prefix: str) -> np.ndarray:
        packed, scale, shape = (
            stored.pop(f"{prefix}.weight_{part}") for part in ("packed", "scale", "shape")
        )
        return widen(dequantize_int4(packed, scale, shape))

    for name, tensor in oracle.model.state_dict().items():
        ours, theirs = stored.pop(name, None), tensor.numpy()
        experts = name.rpartition(".")[0]
        if ours is None and name.endswith("gate_up_proj"):
            halves = [
                [projection(f"{experts}.{expert}.{half}_proj") for half in ("gate", "up")]
                for expert in range(len(theirs))
            ]
            ours = np.array([np.concatenate(pair) for pair in halves])
        elif ours is None:
            ours = np.array(
                [projection(f"{experts}.{expert}.down_proj") for expert in range(len(theirs))]
            )
        assert theirs.dtype == np.float32 and np.array_equal(widen(ours), theirs), name
    assert not stored, "the oracle has no use for these"


@pytest.mark.oracle
def test_oracle_agrees_with_every_golden_token(oracle, record_property):
    close = 0
    for line in golden_lines():
        prompt, tokens, gaps = line["prompt_ids"], line["tokens"], np.array(line["gaps"])
        logits = oracle.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
        np.testing.assert_allclose(first - second, gaps, **LOGIT_TOLERANCE, err_msg=line["name"])
        sure = gaps > SURE_GAP
        assert np.array_equal(logits.argmax(-1)[sure], np.array(tokens)[sure]), line["name"]
        close += int((~sure).sum())
    record_property("summary", f"golden steps that lead by {SURE_GAP} or less: {close}")


@pytest.mark.oracle
@pytest.mark.parametrize("pick", [min, max], ids=["shortest", "longest"])
def test_oracle_regenerates_golden_tokens(oracle, pick):
    line = pick(golden_lines(), key=lambda line: len(line["prompt_ids"]))
    tokens, gaps = oracle.greedy(line["prompt_ids"], STEPS)
    first_close = next((i for i, gap in enumerate(line["gaps"]) if gap <= SURE_GAP), STEPS)
    assert tokens[:first_close] == line["tokens"][:first_close]
    np.testing.assert_allclose(gaps[:first_close], line["gaps"][:first_close], **LOGIT_TOLERANCE)


@pytest.mark.oracle
@pytest.mark.parametrize("shape", make_golden.TREE_SIZES)
def test_oracle_regenerates_golden_trees(oracle, trees, shape):
    tree = {field: array.tolist() for field, array in trees[shape].items()}
    logits = oracle.tree_logits(tree["prompt"], tree["tokens"], tree["parents"])
    np.testing.assert_allclose(logits, trees[shape]["logits"], **LOGIT_TOLERANCE)


@pytest.mark.oracle
def test_oracle_scores_a_node_as_the_sequence_that_leads_to_it(oracle, trees):
    tree = trees["random"]
    paths = [tree["prompt"].tolist()]
    for token, parent in zip(tree["tokens"].tolist(), tree["parents"].tolist(), strict=True):
        paths.append([*paths[parent], token])
    plain = np.array([oracle.logits(path)[-1] for path in paths])
    np.testing.assert_allclose(tree["logits"], plain, **LOGIT_TOLERANCE)
    as_chain = oracle.logits(tree["prompt"].tolist() + tree["tokens"].tolist())[-len(paths) :]
    assert np.abs(as_chain - plain).max() > 0.1, "the mask makes no difference"
