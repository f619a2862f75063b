"""The command: python -m ddtree_numba.generate PROMPT. `options` defines it.

Modules that take time to import are imported once the options are known to be right.
"""

import argparse
import os
import sys
import traceback
from typing import TYPE_CHECKING

from ddtree_numba.interrupts import Interrupted, Interrupts
from ddtree_numba.options import UsageError, parse
from ddtree_numba.screen import Screen, discard_stdout, one_line, open_closed_streams

if TYPE_CHECKING:
    from ddtree_numba.model.watch import ProcessGroup

BROKEN_PIPE = 141  # 128 + SIGPIPE, what shells report of other commands


def main(argv: list[str] | None = None) -> int:
    """Run the command -> its exit code; leaves with SystemExit on options that do not parse."""
    # Before numpy starts: weights meet one row at a time, too little work to share out to threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    open_closed_streams()
    options = parse(argv)
    screen = Screen(quiet=options.quiet, hold=options.show_tree)
    with Interrupts() as interrupts:
        try:
            return run(options, sys.argv[1:] if argv is None else argv, screen, interrupts)
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


def run(
    options: argparse.Namespace, argv: list[str], screen: Screen, interrupts: Interrupts
) -> int:
    """Do what the options ask for -> exit code."""
    if options.version:
        screen.answer(f"ddtree-numba {version()}\n")
        return 0
    if options.plan:
        from ddtree_numba import prepare

        screen.answer(prepare.plan_text(options) + "\n")
        return 0
    from ddtree_numba import processes

    place = processes.place_of(options)
    on_gpus = place is not None or processes.on_gpus(options)
    if options.fast_allreduce and not on_gpus:
        raise UsageError("--fast-allreduce has no effect without a GPU for each rank")
    if options.shard_latents and options.tp == 1:
        raise UsageError("--shard-latents has no effect on one rank")
    if place is None and (on_gpus or options.ranks == "processes"):
        processes.check(options, interrupts)
        return processes.launch(argv, options.tp)
    if place is not None and place.rank:
        return processes.follow(options, place, interrupts)
    with processes.group_at(place) as group:
        return answer(options, screen, interrupts, group)


def answer(
    options: argparse.Namespace,
    screen: Screen,
    interrupts: Interrupts,
    group: "ProcessGroup | None",
) -> int:
    """Decode what the options ask for, with the ranks of a group -> exit code."""
    from ddtree_numba import prepare

    command = prepare.prepare(options, screen, interrupts, group)
    if options.input is not None:
        from ddtree_numba.batch import run_batch

        return run_batch(command)
    from ddtree_numba.single import run_one

    return run_one(command)


def version() -> str:
    """The installed package's version."""
    import importlib.metadata

    try:
        return importlib.metadata.version("ddtree-numba")
    except importlib.metadata.PackageNotFoundError:
        return "(source checkout, not installed)"


if __name__ == "__main__":
    sys.exit(main())
