"""The command line: what may be asked, what it means, and which combinations are refused."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from ddtree_numba.help import DESCRIPTION, EPILOG, USAGE

EXAMPLE = (
    "for example: python -m ddtree_numba.generate 'def fibonacci(n):'  (--help lists the options)"
)

# Filled in by `parse`, which has to tell them from what was given.
DEFAULTS = {
    "mode": "ddtree",
    "backend": "auto",
    "dtype": "bfloat16",
    "tp": 1,
    "budget": "auto",
    "max_new_tokens": 128,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "stop": (),
    "thinking": False,
    "batch": 4,
}
SWITCHES = {
    *("ignore_eos", "chat", "raw", "allow_special", "json", "show_tree", "check", "quiet"),
    *("verbose", "debug", "plan", "version", "fast_allreduce", "shard_latents"),
}
LARGEST_CARD = 1_000_000  # GiB
MOST_RANKS = 1024
MOST_PROMPTS = 255
PLAN_OPTIONS = {"plan", "model", "drafter", "tp", "shard_latents", "card_gib", "debug"}
GREEDY_BELOW = 1e-5  # the temperature below which `next_token` takes the likeliest token


MODE_HELP = "a tree, the drafter's likeliest chain, or one token a round (default: ddtree)"
BUDGET_HELP = (
    "drafted nodes of a tree, 0 to 256; auto: up to 64, as many as pay by measured step times"
    " (default: auto)"
)
CACHE_HELP = "keep packed weights there, which load faster; written by the first run"
RANKS_HELP = (
    "what ranks are, with --tp (default: processes where each has a GPU, or under a launcher, else"
    " threads)"
)
FAST_HELP = (
    "sum over ranks by NCCL's own all-reduce: the promise that speculation changes no token is"
    " withdrawn"
)
LATENTS_HELP = "cut attention's first projection over ranks: fewer bytes, one gather a layer more"
THINKING_HELP = "reason first, on standard error (default: --no-thinking)"
SPECIAL_HELP = "without --chat: names like <|im_end|> in the prompt are control tokens, not text"


class UsageError(ValueError):
    """What was asked for cannot be done; one line, exit code 2."""


def of_option(error: ValueError) -> UsageError:
    """Errors of the library begin with a parameter's name; users know it as an option."""
    name, rest = str(error).split(" ", 1)
    return UsageError(f"--{name.replace('_', '-')} {rest}")


class Parser(argparse.ArgumentParser):
    """Usage errors are one line, with an example, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n{EXAMPLE}\n")


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m ddtree_numba.generate",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=28, width=100
        ),
        allow_abbrev=False,
        argument_default=None,
    )
    add = parser.add_argument_group("prompt (one of)").add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the text, or - to read it from standard input")
    add("--prompt-file", type=some, metavar="FILE", help="read the text from a file")
    add("--input", type=some, metavar="FILE", help="many prompts, a JSON line each; needs --output")
    add("--output", type=some, metavar="FILE", help="their results, a JSON line each; resumable")
    add(
        "--batch",
        type=at_least(1, MOST_PROMPTS),
        metavar="N",
        help="prompts decoded at a time, with --input (default: 4)",
    )

    add = parser.add_argument_group("model").add_argument
    add("--model", type=some, metavar="DIR", help="checkpoint folder (default: the embedded model)")
    add(
        "--drafter",
        type=some,
        metavar="DIR",
        help="folder of the DFlash drafter (default: drafter/ in the model's)",
    )
    add(
        "--backend",
        choices=("auto", "numpy", "cuda"),
        help="default: auto, which is cuda where there is a GPU for it, else numpy",
    )
    add(
        "--tp",
        type=at_least(1, MOST_RANKS),
        metavar="N",
        help="ranks that share the work (default: 1)",
    )
    add("--ranks", choices=("threads", "processes"), help=RANKS_HELP)
    add("--fast-allreduce", action="store_true", help=FAST_HELP)
    add("--shard-latents", action="store_true", help=LATENTS_HELP)
    add("--cache", type=some, metavar="DIR", help=CACHE_HELP)
    add("--dtype", choices=("bfloat16", "float32"), help="of activations (default: bfloat16)")

    add = parser.add_argument_group("decoding").add_argument
    add("--mode", choices=("ddtree", "chain", "ar"), help=MODE_HELP)
    add("--budget", type=budget, metavar="N", help=BUDGET_HELP)
    add(
        "--max-new-tokens",
        type=at_least(0),
        metavar="N",
        help="end the answer after N tokens (default: 128)",
    )
    add(
        "--stop",
        type=some,
        action="append",
        metavar="TEXT",
        help="end the answer before it; repeatable",
    )
    add("--ignore-eos", action="store_true", help="go on past end-of-turn tokens")

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=number, metavar="T", help="0: the likeliest token (default: 0)")
    add("--top-k", type=integer, metavar="K", help="only the K likeliest; 0: all (default: 0)")
    add("--top-p", type=number, metavar="P", help="nucleus, 0 < P <= 1 (default: 1)")
    add("--min-p", type=number, metavar="P", help="at least P of the likeliest (default: 0)")
    add("--seed", type=integer, metavar="N", help="0 .. 2^64 - 1 (default: fresh, and reported)")

    add = parser.add_argument_group("chat").add_argument
    add("--chat", action="store_true", help="the prompt is a user's message")
    add("--system", metavar="TEXT", help="system message to put first")
    add("--thinking", action=argparse.BooleanOptionalAction, help=THINKING_HELP)
    add("--raw", action="store_true", help="keep reasoning and its tags in the answer")
    add("--allow-special", action="store_true", help=SPECIAL_HELP)

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object instead of the text")
    add("--show-tree", action="store_true", help="the tree of each round, its accepted path marked")
    add("--check", action="store_true", help="decode again in mode ar; fail on a difference")
    add("--quiet", action="store_true", help="nothing but errors on standard error")
    add("--verbose", action="store_true", help="stop tokens, context and more on standard error")
    add("--debug", action="store_true", help="show the traceback of an error")

    add = parser.add_argument_group("other").add_argument
    add("--plan", action="store_true", help="print tensors and memory needed; reads no weights")
    add("--card-gib", type=size, metavar="GIB", help="memory of a card (default: 95.59)")
    add("--version", action="store_true", help="print the version")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options with every default filled in; exits with code 2 and one line on what is wrong."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.version:
        return options
    given = {name for name, value in vars(options).items() if value is not None}
    given -= {name for name in SWITCHES if not getattr(options, name)}
    for name, value in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.stop = tuple(options.stop)
    complaint = without_prompt(options, given) or without_effect(options, given)
    if complaint:
        parser.error(complaint)
    return options


def without_prompt(options: argparse.Namespace, given: set[str]) -> str | None:
    """What is wrong with where the prompt comes from."""
    sources = {"prompt": "PROMPT", "prompt_file": "--prompt-file", "input": "--input"}
    chosen = [label for name, label in sources.items() if getattr(options, name) is not None]
    if options.plan:
        return None
    if len(chosen) > 1:
        return f"give one of {' and '.join(chosen)}, not both"
    if not chosen:
        return "no prompt"
    if options.input is not None and "output" not in given:
        return "--input needs --output FILE.jsonl"
    return None


def without_effect(options: argparse.Namespace, given: set[str]) -> str | None:
    """The first given option that would have no effect, in one line."""
    greedy, mode = options.temperature < GREEDY_BELOW, options.mode
    rules: list[tuple[str, bool, str]] = [
        *(
            (name, options.plan and name not in PLAN_OPTIONS, "with --plan")
            for name in sorted(given)
        ),
        ("card_gib", not options.plan, "without --plan"),
        ("ranks", options.tp == 1, "without --tp"),
        ("fast_allreduce", options.backend == "numpy", "with --backend numpy"),
        ("budget", mode != "ddtree", f"with --mode {mode}"),
        *((name, mode == "ar", "with --mode ar") for name in ("drafter", "show_tree", "check")),
        *((name, greedy, "without --temperature") for name in ("top_k", "top_p", "min_p", "seed")),
        *((name, not options.chat, "without --chat") for name in ("system", "thinking")),
        ("raw", not options.thinking, "without --thinking"),
        (
            "allow_special",
            options.chat,
            "with --chat, where only the template writes control tokens",
        ),
        *((name, options.input is None, "without --input") for name in ("output", "batch")),
        ("json", options.input is not None, "with --input, whose output is JSON lines"),
        ("show_tree", options.input is not None, "with --input"),
        *((name, options.quiet, "with --quiet") for name in ("show_tree", "verbose")),
    ]
    for name, useless, when in rules:
        if useless and name in given:
            option = "PROMPT" if name == "prompt" else "--" + name.replace("_", "-")
            return f"{option} has no effect {when}"
    return None


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    def limited(text: str) -> int:
        value = integer(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{value} is above {most}")
        return value

    return limited


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def size(text: str) -> float:
    value = number(text)
    if not 0 < value <= LARGEST_CARD:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to {LARGEST_CARD:,}")
    return value


def some(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    return text


def budget(text: str) -> int | str:
    return text if text == "auto" else at_least(0)(text)
