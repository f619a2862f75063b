"""An engine whose model is two Python functions, to test the loop around a model.

The cache holds token ids in place of keys: every prefix that a function gets was read back through
page tables, scratch rows and commits, so a row in the wrong place becomes a wrong prefix.
"""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from ddtree_numba.engine import Engine
from ddtree_numba.model.backend import NumpyBackend
from ddtree_numba.model.cache import PAGE
from ddtree_numba.model.comm import SingleRank
from ddtree_numba.model.inputs import VerifyInput

Target = Callable[[tuple[int, ...]], int | np.ndarray]  # prefix -> next token, or its logits
Draft = Callable[[tuple[int, ...]], list[int]]  # prefix -> guesses of the next L tokens

UNWRITTEN = -7


class Letters:
    """Token i is chr(i)."""

    hidden_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class ScriptedRanks:
    """What `Ranks` does, with tokens for keys."""

    def __init__(self, target: Target, draft: Draft, depth: int, vocab: int, shape: tuple) -> None:
        pages, slots, nodes = shape
        self.ops, self.comm, self.taps = NumpyBackend(), SingleRank(), None
        self.target, self.drafter, self.depth, self.vocab = target, draft, depth, vocab
        self.pages = np.full((1, pages, PAGE, 1), UNWRITTEN)
        self.context = self.pages.copy()  # the drafter's
        self.scratch = np.full((1, slots, nodes, 1), UNWRITTEN)

    @property
    def traffic(self):
        return self.comm.traffic

    def finish(self) -> None:
        self.ops.finish()
        self.judge(None)

    def judge(self, faults) -> None:
        self.comm.judge(faults)

    def prefix(self, pages: np.ndarray, table: np.ndarray, length: int) -> tuple[int, ...]:
        """The committed tokens of a request."""
        used = table[: -(-length // PAGE)]
        assert (used >= 0).all(), "a page is read that the request does not own"
        tokens = tuple(int(t) for t in pages[0, used].reshape(-1)[:length])
        assert UNWRITTEN not in tokens, "a position is read that was never committed"
        return tokens

    def row(self, answer: int | np.ndarray) -> np.ndarray:
        """A function's answer as a row of logits."""
        if isinstance(answer, np.ndarray):
            return answer.astype(np.float32)
        logits = np.zeros(self.vocab, np.float32)
        logits[answer] = 9
        return logits

    def draft(self, roots, starts, page_table) -> np.ndarray:
        logits = np.empty((len(roots), self.depth, self.vocab), np.float32)
        for r, root in enumerate(roots):
            prefix = (*self.prefix(self.context, page_table[r], int(starts[r])), int(root))
            logits[r] = [self.row(guess) for guess in self.drafter(prefix)]
        return logits

    def candidates(self, roots, starts, page_table, k) -> tuple[np.ndarray, np.ndarray]:
        return self.ops.candidates(self.draft(roots, starts, page_table), k, self.comm)

    def forward(self, batch: VerifyInput, with_taps: bool) -> None:
        requests, nodes = batch.tokens.shape
        self.with_taps = with_taps
        self.scratch[0, :requests, :nodes, 0] = batch.tokens

    def verify(self, batch: VerifyInput, with_taps: bool) -> np.ndarray:
        self.forward(batch, with_taps)
        logits = np.full((*batch.tokens.shape, self.vocab), np.nan, np.float32)
        for r, size in enumerate(batch.sizes):
            committed = self.prefix(self.pages, batch.page_table[r], int(batch.starts[r]))
            for i in range(size):
                path = batch.paths[r, i][batch.paths[r, i] >= 0]
                own = tuple(int(t) for t in batch.tokens[r, path])
                logits[r, i] = self.row(self.target(committed + own))
        return logits

    score = verify

    def choose(self, batch: VerifyInput, with_taps: bool, draws) -> np.ndarray:
        return self.ops.next_tokens(self.verify(batch, with_taps), batch, draws, self.comm)

    def commit(self, starts, nodes, counts, page_table) -> None:
        scratch = self.scratch[:, : len(nodes)]
        for pages in (self.pages, self.context) if self.with_taps else (self.pages,):
            self.ops.cache_commit(pages, scratch, page_table, starts, nodes, counts)


def scripted_engine(
    target: Target,
    draft: Draft,
    *,
    depth: int = 7,
    vocab: int = 256,
    eos: tuple[int, ...] = (),
    context: int = 512,
    max_batch: int = 4,
) -> Engine:
    """An engine that asks `target` for the token after a prefix, and `draft` for guesses."""
    loaded = SimpleNamespace(
        config=SimpleNamespace(
            max_position_embeddings=context, vocab_size=vocab, eos_token_ids=eos
        ),
        drafter_config=SimpleNamespace(block_size=depth + 1),
        tokenizer=Letters(),
        seconds=0.0,
        build=lambda pages, slots, nodes, positions: ScriptedRanks(
            target, draft, depth, vocab, (pages, slots, nodes)
        ),
    )
    return Engine(loaded, max_batch, None)


def answer(engine: Engine, prompt, params, mode: str = "ddtree", budget=16) -> SimpleNamespace:
    """One prompt's whole answer, and how many tokens each of its rounds emitted."""
    increments = list(engine.generate([prompt], params, mode, budget))
    return SimpleNamespace(
        ids=[token for one in increments for token in one.token_ids],
        text="".join(one.text for one in increments),
        reason=increments[-1].finish_reason,
        error=increments[-1].error,
        stats=increments[-1].stats,
        rounds=[len(one.token_ids) for one in increments if one.round],
    )


def count_up(prefix: tuple[int, ...]) -> int:
    return (prefix[-1] + 1) % 200 + 20


def right(prefix: tuple[int, ...], depth: int = 7) -> list[int]:
    """A drafter that is always right about `count_up`."""
    guesses = list(prefix[-1:])
    for _ in range(depth):
        guesses.append(count_up(tuple(guesses)))
    return guesses[1:]


def wrong(prefix: tuple[int, ...], depth: int = 7) -> list[int]:
    return [5] * depth


def some_right(prefix: tuple[int, ...]) -> list[int]:
    """Right for as many tokens as the prefix's sum says."""
    guesses = right(prefix)
    return guesses[: sum(prefix) % 8] + wrong(prefix)[sum(prefix) % 8 :]
