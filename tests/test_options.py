"""Options: defaults, refusals, help."""

import subprocess
import sys

import pytest

from ddtree_numba import backends, engine, options
from ddtree_numba.budget import AUTO_BUDGET, MAX_BUDGET
from ddtree_numba.model import backend, plan
from ddtree_numba.options import build_parser, parse
from ddtree_numba.spec import next_token
from tests.command import ROOT, run


def complaint(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(list(argv))
    assert stopped.value.code == 2
    first, example = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and example.startswith("for example: python -m ")
    return first.removeprefix("error: ")


def test_defaults():
    options = parse(["x"])
    assert (options.mode, options.budget, options.max_new_tokens) == ("ddtree", "auto", 128)
    assert (options.temperature, options.top_k, options.top_p, options.min_p) == (0, 0, 1, 0)
    assert options.seed is None and options.stop == () and not options.thinking
    assert (options.tp, options.backend, options.dtype) == (1, "auto", "bfloat16")


def test_every_option_has_help_and_is_named_in_it():
    text = build_parser().format_help()
    for action in build_parser()._actions:
        assert action.help, action.dest
    for word in ("130", "bonus token", "--stop $'\\n\\n'", "ONE line ending", "torn last line"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_help_repeats_is_what_the_model_says(capsys):
    """Repeated because importing it takes longer than help may."""
    choices = {action.dest: action.choices for action in build_parser()._actions}
    assert choices["mode"] == engine.MODES and choices["backend"] == backends.BACKENDS
    assert choices["dtype"] == tuple(backend.DTYPES)
    assert options.GREEDY_BELOW == next_token.GREEDY_BELOW
    assert f"a tree, 0 to {MAX_BUDGET}; auto: up to {AUTO_BUDGET}," in options.BUDGET_HELP
    assert f"memory of a card (default: {plan.CARD_BYTES / plan.GIB:.2f})" in (
        build_parser().format_help()
    )


@pytest.mark.parametrize(
    "argv, message",
    [
        ("x --budget 3 --mode ar", "--budget has no effect with --mode ar"),
        ("x --budget auto --mode chain", "--budget has no effect with --mode chain"),
        ("x --drafter d --mode ar", "--drafter has no effect with --mode ar"),
        ("x --show-tree --mode ar", "--show-tree has no effect with --mode ar"),
        ("x --check --mode ar", "--check has no effect with --mode ar"),
        ("x --top-k 0", "--top-k has no effect without --temperature"),
        ("x --top-p 1 --temperature 0", "--top-p has no effect without --temperature"),
        ("x --min-p 0 --temperature 1e-8", "--min-p has no effect without --temperature"),
        ("x --seed 0", "--seed has no effect without --temperature"),
        ("x --system s", "--system has no effect without --chat"),
        ("x --thinking", "--thinking has no effect without --chat"),
        ("x --no-thinking", "--thinking has no effect without --chat"),
        ("x --chat --raw", "--raw has no effect without --thinking"),
        ("x --chat --allow-special", "--allow-special has no effect with --chat"),
        ("x --output o", "--output has no effect without --input"),
        ("x --batch 4", "--batch has no effect without --input"),
        ("--input i --output o --json", "--json has no effect with --input"),
        ("--input i --output o --show-tree", "--show-tree has no effect with --input"),
        ("x --quiet --show-tree", "--show-tree has no effect with --quiet"),
        ("x --quiet --verbose", "--verbose has no effect with --quiet"),
        ("x --card-gib 80", "--card-gib has no effect without --plan"),
        ("x --plan", "PROMPT has no effect with --plan"),
        ("--plan --cache c", "--cache has no effect with --plan"),
        ("--plan --mode ddtree", "--mode has no effect with --plan"),
        ("--plan --temperature 0", "--temperature has no effect with --plan"),
    ],
)
def test_an_option_without_effect_is_refused(capsys, argv, message):
    assert complaint(capsys, *argv.split()).startswith(message)


@pytest.mark.parametrize(
    "argv",
    [
        "x --mode chain --show-tree --check",
        "x --mode ar --ignore-eos --stop a --stop b",
        "x --temperature 0.5 --top-k 0 --top-p 1 --min-p 0 --seed 0",
        "x --chat --system s --no-thinking",
        "x --chat --thinking --raw",
        "x --allow-special --json --show-tree --verbose",
        "--input i --output o --check --quiet",
        "--plan --tp 8 --card-gib 80 --model d --drafter e --debug",
    ],
)
def test_options_that_go_together_are_taken(argv):
    parse(argv.split())


def test_a_prompt_may_begin_with_a_dash():
    assert parse(["--json", "--", "--x"]).prompt == "--x"


@pytest.mark.parametrize(
    "argv, message",
    [
        ("", "no prompt"),
        ("--chat", "no prompt"),
        ("x --prompt-file f", "give one of PROMPT and --prompt-file, not both"),
        ("- --input f", "give one of PROMPT and --input, not both"),
        ("--input f", "--input needs --output"),
        ("x y", "unrecognized arguments: y"),
        ("x --budge 3", "unrecognized arguments: --budge 3"),
        ("x --mode tree", "invalid choice"),
        ("x --backend torch", "invalid choice"),
        ("x --tp 0", "0 is below 1"),
        ("x --tp 99999", "99999 is above 1024"),
        ("x --budget -1", "-1 is below 0"),
        ("x --budget many", "'many' is not a whole number"),
        ("x --max-new-tokens -1", "-1 is below 0"),
        ("x --stop=", "argument --stop: the text is empty"),
        ("--prompt-file=", "argument --prompt-file: the text is empty"),
        ("--input= --output=o", "argument --input: the text is empty"),
        ("--input=i --output=", "argument --output: the text is empty"),
        ("x --model=", "argument --model: the text is empty"),
        ("x --drafter=", "argument --drafter: the text is empty"),
        ("x --cache=", "argument --cache: the text is empty"),
        ("x --max-new-tokens 1.5", "'1.5' is not a whole number"),
        ("x --temperature warm", "'warm' is not a number"),
        ("x --temperature nan", "nan is not a finite number"),
        ("x --top-p inf", "inf is not a finite number"),
        ("--plan --card-gib 0", "0 is not above 0"),
        ("--plan --card-gib 1e300", "1e300 is not above 0 and up to 1,000,000"),
    ],
)
def test_what_does_not_parse_is_one_line_with_an_example(capsys, argv, message):
    assert message in complaint(capsys, *argv.split())


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--temperature 1 --top-k -1", "--top-k must be an integer >= 0"),
        ("--temperature -1", "--temperature must be"),
        ("--temperature 1 --top-p 0", "--top-p must be above 0"),
        ("--temperature 1 --top-p 1.5", "--top-p must be"),
        ("--temperature 1 --min-p -0.1", "--min-p must lie between 0 and 1"),
        ("--temperature 1 --min-p 1.1", "--min-p must"),
        ("--temperature 1 --seed -1", "--seed must be"),
        ("--temperature 1 --seed 18446744073709551616", "--seed must be"),
        ("--budget 100000", "--budget must be auto or 0 .. 256"),
    ],
)
def test_s19_values_out_of_range_are_refused_before_loading(monkeypatch, capsys, argv, message):
    monkeypatch.setattr("ddtree_numba.prepare.read_configs", None)  # not reached
    ran = run(monkeypatch, capsys, "x", *argv.split())
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert ran.err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "argv, needed",
    [
        (["--help"], []),
        ([], []),
        (["x", "--budget", "1", "--mode", "ar"], []),
        (["--version"], []),
        (["x", "--budget", "999"], ["numpy", "ml_dtypes"]),
        (["x", "--model", "none"], ["numpy", "ml_dtypes"]),
    ],
)
def test_help_and_usage_errors_come_at_once(argv, needed):
    # Importing takes the time: nothing but the standard library, or numpy, may be needed.
    code = f"""
import sys
from ddtree_numba.generate import main
try:
    code = main({argv!r})
except SystemExit as stopped:
    code = stopped.code
heavy = "numpy", "ml_dtypes", "tiktoken", "jinja2", "tqdm", "ddtree_numba.engine"
print("heavy", [name for name in heavy if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == (0 if argv in (["--help"], ["--version"]) else 2)
    assert ran.stderr.endswith(f"heavy {needed}\n")


def test_version(monkeypatch, capsys):
    ran = run(monkeypatch, capsys, "--version")
    assert ran.code == 0 and ran.out.startswith("ddtree-numba ")
