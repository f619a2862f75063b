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
        if output.finished:
            held = f"{options.output} holds {len(output.finished)} of {len(prompts)} results"
            if failed := failures(output):
                held += f", {len(failed)} failed: to try a record again, delete its line"
            screen.note(held)
        waiting = [prompt for prompt in prompts if prompt.index not in output.finished]
        for prompt in waiting:
            if prompt.error:
                refused = Answer(finish_reason="error", error=prompt.error)
                output.write(refused.output_record(prompt.index))
        code = decode(command, encoder, waiting, output)
        failed = failures(output)
        for index, error in sorted(failed.items()):
            screen.error(f"error: record {index}: {error}")
        return code or (1 if failed else 0)


def failures(output: Output) -> dict[int, str]:
    """Errors by index, earlier runs' too."""
    records = output.finished.items()
    return {index: record["error"] for index, record in records if record.get("error")}


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
    asked, waiting = len(waiting), [prompt for prompt in waiting if not prompt.error]
    if not waiting:
        return 0
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
    answered = sum(answer.finish_reason in ("stop", "length") for answer in answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    rounds = sum(answer.stats.rounds for answer in answers if answer.stats)
    screen.note(
        f"{answered} of {counted(asked, 'prompt')} answered: {counted(tokens, 'token')} in"
        f" {seconds:.1f} s; {per_round(tokens, rounds)}"
    )
    context = command.config.max_position_embeddings
    if full := sum(answer.fills(context) for answer in answers):
        screen.note(f"{counted(full, 'answer')} filled the context of {context} tokens")
    command.note_rounds(engine)
    if interrupts.cancel.is_set():
        return interrupts.exit_code
    if command.options.check:
        right = [number for number, answer in enumerate(answers) if not answer.error]
        prompts, decoded = [waiting[i] for i in right], [answers[i] for i in right]
        return check(command, engine, prompts, decoded)
    return 0
