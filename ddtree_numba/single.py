"""One prompt: its answer is shown while it is made, its statistics after it."""

from ddtree_numba.answer import Answer
from ddtree_numba.check import check
from ddtree_numba.jsonl import dumps
from ddtree_numba.options import GREEDY_BELOW
from ddtree_numba.prepare import Command
from ddtree_numba.progress import Progress
from ddtree_numba.prompts import Prompt, read_prompt
from ddtree_numba.show_tree import TreeText


def run_one(command: Command) -> int:
    """Answer PROMPT, --prompt-file or standard input -> exit code."""
    options, screen = command.options, command.screen
    asked = read_prompt(options, screen)
    encoder = command.encoder()
    prompt = Prompt(0, encoder.text(asked))
    engine = command.load([prompt])
    answer = Answer(encoder.parser(prompt.token_ids))
    trees = TreeText(encoder.tokenizer, screen.err) if options.show_tree else None
    rounds = 0
    reading = Progress("reading", "tokens", screen.err, options.quiet)
    for increment in command.decode(engine, [prompt], reading):
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
    context = command.config.max_position_embeddings
    screen.note(answer.summary(options.temperature < GREEDY_BELOW, context))
    command.note_rounds(engine)
    if command.interrupts.cancel.is_set():
        return command.interrupts.exit_code
    if answer.error:
        screen.error(f"error: {answer.error}")
        return 1
    return check(command, engine, [prompt], [answer]) if options.check else 0
