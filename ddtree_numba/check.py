"""--check: the same prompts again, a token a step; every token must be the same."""

import dataclasses

from ddtree_numba.answer import Answer, counted
from ddtree_numba.engine import Engine
from ddtree_numba.prepare import Command
from ddtree_numba.prompts import Prompt


def check(command: Command, engine: Engine, prompts: list[Prompt], answers: list[Answer]) -> int:
    """Decode finished answers autoregressively too -> 0, or 1 at the first difference."""
    screen, interrupts = command.screen, command.interrupts
    # The seeds that were drawn, so that sampling repeats.
    params = [
        dataclasses.replace(command.params, seed=answer.stats.seed)
        for answer in answers
        if answer.stats is not None
    ]
    plain = [Answer() for _ in prompts]
    ids: list[str | list[int]] = [prompt.token_ids for prompt in prompts]
    for increment in engine.generate(ids, params, "ar", "auto", interrupts.cancel):
        plain[increment.index].add(increment)
    if interrupts.cancel.is_set():
        screen.error("check: interrupted")
        return interrupts.exit_code
    for prompt, answer, reference in zip(prompts, answers, plain, strict=True):
        found = difference(answer.token_ids, reference.token_ids)
        if found or reference.error:
            screen.error(f"check failed: prompt {prompt.index}, {found or reference.error}")
            return 1
    tokens = sum(len(answer.token_ids) for answer in answers)
    text = f"check: {counted(tokens, 'token')} equal to autoregressive decoding"
    rates = [answer.stats and answer.stats.tokens_per_second for answer in (*answers, *plain)]
    if len(rates) == 2 and rates[0] and rates[1]:
        text += f", at {rates[0] / rates[1]:.2f} times its speed ({rates[1]:.1f} tokens/s)"
    screen.note(text)
    return 0


def difference(ours: list[int], plain: list[int]) -> str | None:
    """The first position (from 0) at which two answers differ, and both ids; None if none."""
    for position in range(max(len(ours), len(plain))):
        pair = [str(ids[position]) if position < len(ids) else "no token" for ids in (ours, plain)]
        if pair[0] != pair[1]:
            return f"token {position}: {pair[0]}, but {pair[1]} in autoregressive decoding"
    return None
