"""The command: python -m ddtree_numba.generate PROMPT. `options` defines it."""

import argparse
import dataclasses
import sys
import traceback
from typing import TYPE_CHECKING

from ddtree_numba.interrupts import Interrupted, Interrupts
from ddtree_numba.options import GREEDY_BELOW, UsageError, parse
from ddtree_numba.screen import Screen, discard_stdout, one_line

# Everything that takes time to import is imported once the options are known to be right.
if TYPE_CHECKING:
    from ddtree_numba.answer import Answer
    from ddtree_numba.engine import Engine
    from ddtree_numba.prompts import Prompt
    from ddtree_numba.sampling import SamplingParams
    from ddtree_numba.setup import Setup

BROKEN_PIPE = 141  # 128 + SIGPIPE, what shells report of other commands


def main(argv: list[str] | None = None) -> int:
    """Run the command -> its exit code; leaves with SystemExit on options that do not parse."""
    options = parse(argv)
    screen = Screen(quiet=options.quiet, hold=options.show_tree)
    with Interrupts() as interrupts:
        try:
            return run(options, screen, interrupts)
        except Interrupted:
            screen.error("interrupted before anything was decoded")
            return interrupts.exit_code
        except BrokenPipeError:
            discard_stdout()
            return BROKEN_PIPE
        except Exception as error:
            screen.finish()
            if options.debug:
                traceback.print_exc()
            screen.error(f"error: {one_line(error)}")
            return 2 if isinstance(error, UsageError) else 1


def run(options: argparse.Namespace, screen: Screen, interrupts: Interrupts) -> int:
    """Everything after the options: prompts, model, answers."""
    if options.version:
        from ddtree_numba.setup import version

        screen.answer(f"ddtree-numba {version()}\n")
        return 0
    from ddtree_numba import setup

    if options.plan:
        screen.answer(setup.plan_text(options).rstrip("\n") + "\n")
        return 0
    params = setup.sampling_params(options)
    if options.input is not None:
        from ddtree_numba.batch import run_batch

        return run_batch(options, params, screen, interrupts)
    from ddtree_numba.prompts import Prompt, read_prompt

    text = read_prompt(options)
    ready = setup.prepare(options, screen)
    prompt = Prompt(0, ready.encoder.text(text))
    engine = setup.load_engine(options, ready, [prompt], screen)
    return answer_one(options, params, ready, prompt, engine, screen, interrupts)


def answer_one(
    options: argparse.Namespace,
    params: "SamplingParams",
    ready: "Setup",
    prompt: "Prompt",
    engine: "Engine",
    screen: Screen,
    interrupts: Interrupts,
) -> int:
    """Decode one prompt, streaming -> exit code."""
    from ddtree_numba.answer import Answer
    from ddtree_numba.jsonl import dumps
    from ddtree_numba.show_tree import TreeText

    answer = Answer(ready.parser(prompt.token_ids))
    trees = TreeText(engine.tokenizer, screen.err) if options.show_tree else None
    rounds = 0
    interrupts.gentle = True
    for increment in engine.generate(
        [prompt.token_ids], params, options.mode, options.budget, interrupts.cancel
    ):
        reasoning, text = answer.add(increment)
        screen.reasoning(reasoning)
        if not options.json:
            screen.answer(text)
        if trees is not None and increment.round is not None:
            rounds += 1
            screen.note(trees.draw(increment.round, rounds))
    if options.json:
        screen.answer(dumps(answer.record()) + "\n")
    screen.finish()
    screen.note(answer.summary(greedy=options.temperature < GREEDY_BELOW))
    if interrupts.cancel.is_set():
        return interrupts.exit_code
    if answer.error:
        screen.error(f"error: {answer.error}")
        return 1
    if options.check:
        return check([prompt], [answer], params, engine, screen, interrupts)
    return 0


def check(
    prompts: "list[Prompt]",
    answers: "list[Answer]",
    params: "SamplingParams",
    engine: "Engine",
    screen: Screen,
    interrupts: Interrupts,
) -> int:
    """Decode the prompts again, a token a step, and compare -> 0, or 1 at the first difference."""
    from ddtree_numba.answer import Answer, counted

    # The seeds that were drawn, so that sampling repeats.
    each = [
        dataclasses.replace(params, seed=answer.stats.seed) for answer in answers if answer.stats
    ]
    plain = [Answer() for _ in prompts]
    ids: list[str | list[int]] = [prompt.token_ids for prompt in prompts]
    for increment in engine.generate(ids, each, "ar", "auto", interrupts.cancel):
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


if __name__ == "__main__":
    sys.exit(main())
