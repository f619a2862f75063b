"""Golden lines, and an engine's whole answers to several prompts."""

import json
from pathlib import Path

from ddtree_numba.engine import Engine
from ddtree_numba.sampling import SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
LINES = [json.loads(line) for line in (GOLDEN / "golden_tokens.jsonl").read_text().splitlines()]
PROMPTS = [line["prompt_ids"] for line in LINES]
TOKENS = 64  # of a golden answer


def sampling(seed: int | None, tokens: int = TOKENS) -> SamplingParams:
    """So many tokens whatever they are: the likeliest, or drawn with a seed."""
    temperature = 0.0 if seed is None else 0.8
    return SamplingParams(temperature, max_new_tokens=tokens, ignore_eos=True, seed=seed)


def decode(
    engine: Engine, prompts: list, params, mode: str = "ddtree", budget: str | int = "auto"
) -> list[list[int]]:
    """Each prompt's tokens; arguments as of `Engine.generate`."""
    answers: list[list[int]] = [[] for _ in prompts]
    for one in engine.generate(prompts, params, mode, budget):
        assert one.error is None, one.error
        answers[one.index] += one.token_ids
    return answers
