"""--input and --output: many prompts, a few at a time, each result written at once."""

import time

from ddtree_numba.answer import Answer, counted, per_round
from ddtree_numba.check import check
from ddtree_numba.jsonl import Output, read_records
from ddtree_numba.options import UsageError
from ddtree_numba.prepare import Command
from ddtree_numba.progress import Progress
from ddtree_numba.prompts import Encoder, Prompt


def run_batch(command: Command) -> int:
    """Answer every record that the output does not hold yet -> exit code."""
    options, screen = command.options, command.screen
    records = read_records(options.input)
    encoder = command.encoder()
    prompts = [encoder.record(index, record) for index, record in enumerate(records)]
    with Output(options.output, options.input) as output:
        check_resumed(output, prompts)
        waiting = [prompt for prompt in prompts if prompt.index not in output.finished]
        if len(waiting) < len(prompts):
            screen.note(
                f"{options.output} holds {len(prompts) - len(waiting)} of {len(prompts)} results"
            )
        for prompt in waiting:
            if prompt.error:
                refused = Answer(finish_reason="error", error=prompt.error)
                output.write(refused.output_record(prompt.index))
        waiting = [prompt for prompt in waiting if not prompt.error]
        code = decode(command, encoder, waiting, output) if waiting else 0
        failed = [index for index, record in output.finished.items() if record.get("error")]
        for index in sorted(failed):
            screen.error(f"error: record {index}: {output.finished[index]['error']}")
        return code or (1 if failed else 0)


def check_resumed(output: Output, prompts: list[Prompt]) -> None:
    """Refuse an output that was made from another input, as far as its prompts' lengths show."""
    for index, record in output.finished.items():
        if not 0 <= index < len(prompts):
            raise UsageError(
                f"{output.path} holds index {index}, the input ends at {len(prompts) - 1}"
            )
        before, now = record.get("prompt_tokens"), len(prompts[index].token_ids)
        if before is not None and before != now:
            raise UsageError(
                f"{output.path} was made from another input:"
                f" prompt {index} had {before} tokens, now {now}"
            )


def decode(command: Command, encoder: Encoder, waiting: list[Prompt], output: Output) -> int:
    """Decode `waiting` and write each result -> exit code of interruption and --check."""
    screen, interrupts = command.screen, command.interrupts
    engine = command.load(waiting)
    answers = [Answer(encoder.parser(prompt.token_ids)) for prompt in waiting]
    begin, done = time.perf_counter(), 0
    with Progress("prompts", "prompts", screen.err, command.options.quiet) as progress:
        progress(0, len(waiting))
        for increment in command.decode(engine, waiting):
            answer = answers[increment.index]
            answer.add(increment)
            if answer.finish_reason not in (None, "cancelled"):
                output.write(answer.output_record(waiting[increment.index].index))
                done += 1
                progress(done, len(waiting))
    seconds = time.perf_counter() - begin
    tokens = sum(len(answer.token_ids) for answer in answers)
    rounds = sum(answer.stats.rounds for answer in answers if answer.stats)
    screen.note(
        f"{done} of {counted(len(waiting), 'prompt')} answered: {counted(tokens, 'token')} in"
        f" {seconds:.1f} s; {per_round(tokens, rounds)}"
    )
    command.note_rounds(engine)
    if interrupts.cancel.is_set():
        return interrupts.exit_code
    if command.options.check:
        right = [number for number, answer in enumerate(answers) if not answer.error]
        prompts, decoded = [waiting[i] for i in right], [answers[i] for i in right]
        return check(command, engine, prompts, decoded)
    return 0
