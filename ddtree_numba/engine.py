"""The engine: admits prompts, runs rounds over all of them, and yields what each round emitted."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_numba import kept_times, verbs
from ddtree_numba.budget import AUTO_BUDGET, MAX_BUDGET, StepTimes
from ddtree_numba.detokenize import Detokenizer
from ddtree_numba.load import EMBEDDED, Loaded, Setup, Sources, load_checkpoint
from ddtree_numba.model.cache import PAGE, PageTable, pages_for
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.players import player_of
from ddtree_numba.prefill import CHUNK, prefill
from ddtree_numba.request import Increment, Request, RoundTrace, refusal
from ddtree_numba.rounds import Flight, Rounds, rounds_of
from ddtree_numba.sampling import SamplingParams
from ddtree_numba.spec.tree_build import Tree

MODES = ("ddtree", "chain", "ar")
MOST_BATCH = 255  # trees of 257 nodes: the rows of a launch are numbered with 16 bits


class Engine:
    """A loaded model, ready to generate.

    Public: `config`, `drafter_config`, `tokenizer`, `context` (longest prompt and answer together).
    """

    def __init__(self, loaded: Loaded, max_batch: int, max_context: int | None) -> None:
        self.config, self.drafter_config = loaded.config, loaded.drafter_config
        self.tokenizer, self.load_seconds = loaded.tokenizer, loaded.seconds
        if not 1 <= max_batch <= MOST_BATCH:
            raise ValueError(f"max_batch must be 1 .. {MOST_BATCH}, not {max_batch}")
        if max_context is not None and max_context < 2:
            raise ValueError(f"max_context must be at least 2 tokens, not {max_context}")
        limit = self.config.max_position_embeddings
        self.context = limit if max_context is None else min(max_context, limit)
        self.max_batch = max_batch
        pages = max_batch * pages_for(self.context)
        block = self.drafter_config.block_size if self.drafter_config else 1
        self._can_draft = block > 1
        nodes = max(MAX_BUDGET + 1, CHUNK, block)
        self.ranks = loaded.build(pages + 1, max_batch, nodes, self.context + nodes)
        self.pages = PageTable(max_batch + 1, pages + 1, self.context)
        self._spare = max_batch  # a slot that no request gets: step times are measured on it
        self.pages.reserve(self._spare, PAGE)
        self.stop_ids = frozenset(self.tokenizer.stop_ids) | set(self.config.eos_token_ids)
        self._times: StepTimes | None = None
        self.rounds = self._rounds()

    @classmethod
    def load(
        cls,
        folder: str | Path | None = None,
        drafter: str | Path | None = None,
        backend: str = "auto",
        tp: int = 1,
        *,
        dtype: str = "bfloat16",
        max_batch: int = 4,
        max_context: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        cache: str | Path | None = None,
        shard_latents: bool = False,
    ) -> "Engine":
        """Load a checkpoint folder and its drafter.

        `folder` None: the embedded model. `drafter` None: the folder's subfolder `drafter`, if any.
        `backend` is "auto", "numpy" or "cuda"; `tp` ranks share the work, threads of this process,
        with cuda on one GPU; `dtype` is that of activations and cache; `max_batch` prompts are
        answered at a time, each within `max_context` tokens, prompt included (None: the model's
        limit). `cache`: a folder in which packed weights are kept. `shard_latents`: see
        `ModelConfig`. While weights are read, `progress(bytes_done, bytes_total)` is called. Raises
        CheckpointError or ValueError, in one line, before anything is generated.
        """
        sources = Sources(Path(folder or EMBEDDED), drafter, cache)
        loaded = load_checkpoint(sources, Setup(backend, tp, dtype, shard_latents), progress)
        return cls(loaded, max_batch, max_context)

    def generate(
        self,
        prompts: list[str | list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        mode: str = "ddtree",
        budget: str | int = "auto",
        cancel: threading.Event | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Increment]:
        """Answer prompts (text or token ids), `max_batch` at a time.

        Yields one `Increment` a round and prompt. Modes: "ddtree" verifies trees of `budget` nodes
        beside the root ("auto": as many as pay, up to 64), "chain" the greedy DFlash chain, "ar"
        decodes one token a step; all three emit the same tokens. Setting `cancel` ends every answer
        after the current round; `progress(done, total)` tells how many tokens of a long prompt have
        been read. A prompt that cannot be answered yields an error increment.
        """
        self._check(mode, budget)
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise TypeError("prompts must be a list of texts or of lists of token ids")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
        waiting = deque(enumerate(zip(prompts, params, strict=True)))
        return self._generate(waiting, mode, budget, cancel, progress)

    def logits(
        self, prompt: list[int], tokens: list[int] | None = None, parents: list[int] | None = None
    ) -> np.ndarray:
        """The target's logits, float32 [N,V]: after a prompt (row 0) and after each node below it.

        `tokens` [N-1] are the nodes beside the root, `parents` [N-1] their parents (0: the root).
        """
        tokens, parents = tokens or [], parents or []
        if error := refusal([*prompt, *tokens], self.context, self.config.vocab_size):
            raise ValueError(error)
        if len(parents) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens but {len(parents)} parents")
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        tree = Tree(
            np.array([[prompt[-1], *tokens]], np.int32),
            np.array([[-1, *parents]], np.int32),
            np.array([depths], np.int32),
            np.zeros((1, len(depths)), np.float32),
            np.array([len(depths)], np.int32),
        )
        slot = self.pages.free_slot()
        try:
            self.pages.reserve(slot, len(prompt))
            self._prefill(prompt, slot, False)
            starts = np.array([len(prompt) - 1], np.int32)
            batch = VerifyInput.of_tree(tree, starts, self.pages.rows[slot : slot + 1])
            logits = self.ranks.verify(batch, False)
            self.ranks.finish()
            return self.ranks.ops.host(logits)[0]
        finally:
            self.pages.release(slot)

    def _rounds(self) -> Rounds:
        return rounds_of(player_of(self.ranks), self.pages.rows, self.context)

    def _check(self, mode: str, budget: str | int) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if mode != "ar" and self.drafter_config is None:
            raise ValueError(f"mode {mode!r} needs a drafter; this checkpoint has none")
        if budget != "auto" and not (type(budget) is int and 0 <= budget <= MAX_BUDGET):
            raise ValueError(f"budget must be 'auto' or 0 .. {MAX_BUDGET}, not {budget!r}")

    def _generate(
        self,
        waiting: deque,
        mode: str,
        budget: str | int,
        cancel: threading.Event | None,
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[Increment]:
        active: list[Request] = []
        flights: deque[Flight] = deque()
        if mode == "ddtree" and budget == "auto" and self._can_draft:
            self.step_times()
        try:
            while waiting or active:
                while waiting and len(active) < self.max_batch:
                    if active and not len(self.pages.free_slots):
                        break  # others have them: wait until a request ends
                    index, (prompt, params) = waiting[0]
                    admitted = self._admit(index, prompt, params, mode, budget, cancel, progress)
                    if admitted is None:
                        break  # too few free pages: wait until a request ends
                    waiting.popleft()
                    if isinstance(admitted, Increment):
                        yield admitted
                    else:
                        active.append(admitted)
                if cancel is not None and cancel.is_set():
                    for request in active:
                        request.finish_reason = "cancelled"
                        yield self._report(request, [], "")
                    for index, _ in waiting:
                        yield Increment(index, finish_reason="cancelled")
                    return
                while active and len(flights) <= self.rounds.ahead:
                    if flights and not self.rounds.follows(flights[-1], active):
                        break  # the next round needs to know how these end
                    flights.append(self.rounds.start(active, self._plan(active, mode, budget)))
                if flights:
                    yield from self._land(flights.popleft())
                    for request in active:
                        if request.finish_reason:
                            self.pages.release(request.slot)
                    active = [request for request in active if not request.finish_reason]
        finally:
            for request in active:
                self.pages.release(request.slot)

    def _admit(
        self,
        index: int,
        prompt: str | list[int],
        params: SamplingParams,
        mode: str,
        budget: str | int,
        *watched: Any,
    ) -> Request | Increment | None:
        """Give a prompt pages and prefill it; an Increment if it ends at once, None if it waits."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if error := refusal(ids, self.context, self.config.vocab_size):
            return Increment(index, finish_reason="error", error=error)
        detokenizer = Detokenizer(self.tokenizer, params.stop)
        label = budget if mode == "ddtree" else None
        seed = params.seed_or_fresh()
        request = Request(index, ids, params, detokenizer, seed, mode, label)
        if params.max_new_tokens == 0:
            request.finish_reason = "length"
            return self._report(request, [], "")
        slot = self.pages.free_slot()
        if not self.pages.reserve(slot, min(self.context, len(ids) + params.max_new_tokens)):
            return None
        request.slot = slot
        begin = time.perf_counter()
        done = False
        try:
            done = self._prefill(ids, slot, self._drafts(mode), *watched)
            self.ranks.finish()
        finally:
            if not done:
                self.pages.release(slot)
        if not done:
            request.finish_reason = "cancelled"
            return self._report(request, [], "")
        request.length = len(ids) - 1
        request.prefill_seconds = time.perf_counter() - begin
        return request

    def _prefill(self, ids: list[int], slot: int, with_taps: bool, *watched: Any) -> bool:
        return prefill(self.ranks, ids, self.pages.rows[slot : slot + 1], with_taps, *watched)

    def _land(self, flight: Flight) -> Iterator[Increment]:
        """Emit what a round yields; nothing for requests that had ended when it started."""
        results, seconds = self.rounds.results(flight)
        for request, result in zip(flight.requests, results, strict=True):
            if request.finish_reason:
                continue
            request.rounds += 1
            tokens = result.tokens
            count, text = request.take(tokens, self.stop_ids, self.context)
            request.spend(seconds, count, flight.timed)
            request.length += result.count
            yield self._report(request, tokens[:count], text, result.trace(count))

    def _report(
        self, request: Request, tokens: list[int], text: str, trace: RoundTrace | None = None
    ) -> Increment:
        return request.increment(tokens, text, self.ranks.ops.name, self.load_seconds, trace)

    def _drafts(self, mode: str) -> bool:
        """Is anything drafted? A drafter whose block is the root alone proposes nothing."""
        return mode != "ar" and self._can_draft

    def _plan(self, active: list[Request], mode: str, budget: str | int) -> verbs.Plan:
        drafts = self._drafts(mode)
        if not drafts or not any(request.room(self.context) for request in active):
            return verbs.Plan(drafts, candidates=0, budget=0)
        if mode == "chain":
            assert self.drafter_config is not None
            return verbs.Plan(True, candidates=1, budget=self.drafter_config.block_size - 1)
        if isinstance(budget, str):
            return verbs.Plan(True, verbs.CANDIDATES, AUTO_BUDGET, self.step_times())
        return verbs.Plan(True, min(budget, verbs.CANDIDATES), budget)

    def step_times(self) -> StepTimes:
        """Seconds of a draft and of verify steps by width: measured once, on the spare slot.

        Where they do not change from run to run they are kept.
        """
        machine = self.rounds.player.machine
        if self._times is None and machine is not None:
            kept = kept_times.place(machine, self.config, self.drafter_config)
            self._times = kept_times.load(kept)
        if self._times is None:
            self._prefill([0] * (PAGE + 1), self._spare, True)
            times = self.rounds.step_times(self._spare)
            self.ranks.finish()  # times of steps that ended early are none
            if machine is not None:
                kept_times.store(kept, times)
            self._times = times
        return self._times
