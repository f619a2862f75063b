"""What the command makes ready before it decodes: parameters, prompts' encoder, engine."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_numba.options import UsageError
from ddtree_numba.sampling import SamplingParams
from ddtree_numba.screen import Screen

# Imported where they are needed, so that a wrong option is refused without waiting for them.
if TYPE_CHECKING:
    from ddtree_numba.engine import Engine
    from ddtree_numba.prompts import Encoder, Prompt
    from ddtree_numba.reasoning import ReasoningParser

GIB = 1 << 30


@dataclass(frozen=True)
class Setup:
    """What is known of the checkpoint without its weights."""

    options: argparse.Namespace
    folder: Path
    encoder: "Encoder"
    context: int

    def parser(self, prompt_ids: list[int]) -> "ReasoningParser | None":
        """A parser for an answer whose reasoning is to be kept apart."""
        if not self.options.thinking or self.options.raw:
            return None
        from ddtree_numba.reasoning import ReasoningParser

        return ReasoningParser.after_prompt(self.encoder.tokenizer, prompt_ids)


def version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("ddtree-numba")
    except importlib.metadata.PackageNotFoundError:
        return "(source checkout, not installed)"


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The options' parameters; UsageError for a value out of range."""
    from ddtree_numba.budget import MAX_BUDGET

    try:
        params = SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
            stop=options.stop,
            ignore_eos=options.ignore_eos,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.budget != "auto" and options.budget > MAX_BUDGET:
        raise UsageError(f"budget must be auto or 0 .. {MAX_BUDGET}, not {options.budget}")
    return params


def model_folder(options: argparse.Namespace) -> Path:
    from ddtree_numba.load import EMBEDDED

    return Path(options.model) if options.model is not None else EMBEDDED


def plan_text(options: argparse.Namespace) -> str:
    """--plan: the checkpoint's tensors and memory, from its configuration alone."""
    from ddtree_numba.model.config import load_config, load_drafter_config
    from ddtree_numba.model.plan import plan, render

    folder = model_folder(options)
    drafter = Path(options.drafter) if options.drafter else folder / "drafter"
    drafter_config = None
    if options.drafter or (drafter / "config.json").is_file():
        drafter_config = load_drafter_config(drafter)
    card_bytes = int(options.card_gib * GIB)
    return render(plan(load_config(folder), drafter_config, tp=options.tp, card_bytes=card_bytes))


def prepare(options: argparse.Namespace, screen: Screen) -> Setup:
    """Read configuration, tokenizer, chat template; CheckpointError or UsageError in one line."""
    from ddtree_numba.model.config import load_config
    from ddtree_numba.prompts import Encoder
    from ddtree_numba.tokenizer import Tokenizer

    folder = model_folder(options)
    config = load_config(folder)
    drafter = folder / "drafter" / "config.json"
    if options.mode != "ar" and options.drafter is None and not drafter.is_file():
        raise UsageError(f"{drafter.parent} holds no drafter: give --drafter DIR, or --mode ar")
    tokenizer = Tokenizer.load(folder)
    chat = None
    if options.chat:
        from ddtree_numba.chat import Chat

        chat = Chat.load(folder, tokenizer)
    if options.top_k > config.vocab_size:
        screen.note(
            f"note: --top-k {options.top_k} is above the vocabulary of {config.vocab_size}: off"
        )
    if options.verbose:
        stops = (f"{tokenizer.name_of(i)} {i}" for i in sorted(tokenizer.stop_ids))
        screen.note(f"model {folder}; stop tokens: {', '.join(stops)}")
    return Setup(
        options, folder, Encoder(options, tokenizer, chat, config), config.max_position_embeddings
    )


def load_engine(
    options: argparse.Namespace, ready: Setup, prompts: "list[Prompt]", screen: Screen
) -> "Engine":
    """Read the weights, with progress; the cache is made as large as these prompts can need."""
    from ddtree_numba.engine import Engine
    from ddtree_numba.progress import Progress

    longest = max(len(prompt.token_ids) for prompt in prompts)
    if options.verbose:
        screen.note("loading")
    with Progress("loading", "B", screen.err, options.quiet) as progress:
        engine = Engine.load(
            ready.folder,
            options.drafter,
            options.backend,
            options.tp,
            dtype=options.dtype,
            max_batch=min(len(prompts), 4),
            max_context=min(ready.context, longest + max(options.max_new_tokens, 1)),
            progress=progress,
        )
    if options.verbose:
        screen.note(f"context {ready.context} tokens, longest prompt {longest}")
    return engine
