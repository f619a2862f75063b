"""From options to everything that is known before prompts and weights are read.

Whatever an option can be blamed for is refused here, as UsageError; the cheapest checks come first,
and modules that take time to import only after them.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_numba.budget import MAX_BUDGET
from ddtree_numba.interrupts import Interrupts
from ddtree_numba.options import UsageError, of_option
from ddtree_numba.sampling import SamplingParams
from ddtree_numba.screen import Screen

if TYPE_CHECKING:
    from ddtree_numba.engine import Engine
    from ddtree_numba.load import Sources
    from ddtree_numba.model.config import DrafterConfig, ModelConfig
    from ddtree_numba.model.watch import ProcessGroup
    from ddtree_numba.prompts import Encoder, Prompt
    from ddtree_numba.request import Increment


@dataclass(frozen=True)
class Command:
    """One run of the command: what was asked for, and the streams and signals it works with."""

    options: argparse.Namespace
    params: SamplingParams
    folder: Path
    config: "ModelConfig"
    screen: Screen
    interrupts: Interrupts
    group: "ProcessGroup | None" = None  # of ranks that are processes

    def encoder(self) -> "Encoder":
        """Read tokenizer and, with --chat, template; CheckpointError in one line."""
        from ddtree_numba.prompts import Encoder
        from ddtree_numba.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(self.folder)
        chat = None
        if self.options.chat:
            from ddtree_numba.chat import Chat

            chat = Chat.load(self.folder, tokenizer)
        if self.options.verbose:
            stops = (f"{tokenizer.name_of(i)} {i}" for i in sorted(tokenizer.stop_ids))
            self.screen.note(f"model {self.folder}; stop tokens: {', '.join(stops)}")
        return Encoder(self.options, tokenizer, chat, self.config)

    def load(self, prompts: "list[Prompt]") -> "Engine":
        """`read`, and what --verbose counts."""
        engine = self.read(prompts)
        if self.options.verbose:
            engine.ranks.ranks[0].count_experts()
        return engine

    def read(self, prompts: "list[Prompt]") -> "Engine":
        """Read the weights, with progress; the cache is as large as these prompts can need."""
        from ddtree_numba.progress import Progress

        options, context = self.options, self.config.max_position_embeddings
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if options.verbose:
            self.screen.note(f"loading; context {context} tokens, longest prompt {longest}")
        with Progress("loading", "B", self.screen.err, options.quiet) as progress:
            more: dict[str, Any] = dict(
                max_batch=min(len(prompts), options.batch),
                max_context=min(context, longest + max(options.max_new_tokens, 1)),
                progress=progress,
            )
            if self.group is not None:
                from ddtree_numba import led
                from ddtree_numba.load import Setup

                setup = Setup(
                    options.backend,
                    dtype=options.dtype,
                    shard_latents=options.shard_latents,
                    fast_allreduce=options.fast_allreduce,
                )  # as many ranks as the group has
                more |= dict(note=self.screen.note)
                return led.load(self.group, self.sources(), setup, **more)
            from ddtree_numba.engine import Engine

            more |= dict(cache=options.cache, shard_latents=options.shard_latents)
            named = self.folder, options.drafter, options.backend, options.tp
            return Engine.load(*named, dtype=options.dtype, **more)

    def sources(self) -> "Sources":
        """What is read, by this rank."""
        from ddtree_numba.load import Sources

        return Sources(self.folder, self.options.drafter, self.options.cache)

    def note_rounds(self, engine: "Engine") -> None:
        """With --verbose: what a round asked of the experts, and of other ranks."""
        player = engine.rounds.player
        rounds = player.played
        if not self.options.verbose or not rounds:
            return
        rank = engine.ranks.ranks[0]
        used = rank.ops.host(rank.used)
        if used.any():
            each, config = used[used > 0].mean() / rounds, self.config
            self.screen.note(
                f"experts: {each:.1f} of {config.n_routed_experts} a layer and round;"
                f" a token picks {config.num_experts_per_tok}"
            )
        if self.options.tp > 1:
            calls, size = player.traffic.calls, player.traffic.bytes
            self.screen.note(
                f"ranks: {self.options.tp}; a round: {calls / rounds:.1f} calls,"
                f" {size / rounds:,.0f} bytes of payload a rank"
            )

    def decode(
        self,
        engine: "Engine",
        prompts: "list[Prompt]",
        progress: Callable[[int, int], None] | None = None,
    ) -> "Iterator[Increment]":
        """The answers as they come; from here on, a first signal waits for the round's end."""
        self.interrupts.gentle = True
        ids: list[str | list[int]] = [prompt.token_ids for prompt in prompts]
        mode, budget = self.options.mode, self.options.budget
        return engine.generate(ids, self.params, mode, budget, self.interrupts.cancel, progress)


def prepare(
    options: argparse.Namespace,
    screen: Screen,
    interrupts: Interrupts,
    group: "ProcessGroup | None" = None,
) -> Command:
    """Check the options' values against this machine and the model's configuration.

    UsageError for options, CheckpointError for what the folders hold, in one line.
    """
    params = sampling_params(options)
    folder, config, drafter_config = read_configs(options)
    if options.mode != "ar":
        if drafter_config is None:
            raise UsageError(f"{folder} holds no drafter: give --drafter DIR, or --mode ar")
        if drafter_config.block_size == 1:
            from ddtree_numba.load import drafter_folder

            path = drafter_folder(folder, options.drafter)
            screen.note(f"note: {path}/config.json: block_size is 1: this drafter proposes nothing")
    if options.top_k > config.vocab_size:
        screen.note(
            f"note: --top-k {options.top_k} is above the vocabulary of {config.vocab_size}: off"
        )
    return Command(options, params, folder, config, screen, interrupts, group)


def plan_text(options: argparse.Namespace) -> str:
    """--plan: the checkpoint's tensors and memory, from its configuration alone."""
    _, config, drafter_config = read_configs(options)
    from ddtree_numba.model.plan import CARD_BYTES, GIB, plan, render

    card_bytes = CARD_BYTES if options.card_gib is None else int(options.card_gib * GIB)
    return render(plan(config, drafter_config, tp=options.tp, card_bytes=card_bytes))


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The parameters of every answer; UsageError for a value out of range."""
    if options.budget != "auto" and options.budget > MAX_BUDGET:
        raise UsageError(f"--budget must be auto or 0 .. {MAX_BUDGET}, not {options.budget}")
    names = [field.name for field in fields(SamplingParams)]  # each has an option
    try:
        return SamplingParams(**{name: getattr(options, name) for name in names})
    except ValueError as error:
        raise of_option(error) from None


def read_configs(
    options: argparse.Namespace,
) -> "tuple[Path, ModelConfig, DrafterConfig | None]":
    """(folder, configuration, the drafter's) of the model, which --backend and --tp must fit."""
    if options.cache is not None:
        check_cache(options.cache)
    for name in ("model", "drafter"):
        path = getattr(options, name)
        if path is not None and not Path(path).is_dir():
            raise UsageError(f"--{name} {path}: no such folder")
    from ddtree_numba.backends import name_of
    from ddtree_numba.load import EMBEDDED, drafter_folder
    from ddtree_numba.model.config import check_pair, load_config, load_drafter_config
    from ddtree_numba.model.fields import CheckpointError
    from ddtree_numba.model.sharding import check_tp

    try:
        name_of(options.backend, options.dtype)
    except ValueError as error:
        raise of_option(error) from None
    folder = EMBEDDED if options.model is None else Path(options.model)
    config = replace(load_config(folder), shards_latents=options.shard_latents)
    drafter = drafter_folder(folder, options.drafter)
    drafter_config = None if drafter is None else load_drafter_config(drafter)
    if drafter_config is not None:
        check_pair(config, drafter_config, folder, drafter)
    check_tp(config, 1, drafter_config)  # what fails for one rank is the checkpoint's fault
    try:
        check_tp(config, options.tp, drafter_config)
    except CheckpointError as error:
        raise UsageError(f"--tp {options.tp}: {error}") from None
    return folder, config, drafter_config


def check_cache(cache: str) -> None:
    """UsageError for what can be no folder; one that is not there is made when it is needed."""
    try:
        folder = Path(cache).is_dir() or not Path(cache).exists()
    except OSError as error:  # too long, or in a folder that may not be looked into
        raise UsageError(f"--cache {cache}: {error.strerror}") from None
    if not folder:
        raise UsageError(f"--cache {cache}: is no folder")
