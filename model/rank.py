"""One tensor-parallel rank: its weights, its cache, and what a round asks of both."""

from typing import Any

import numpy as np

from ddtree_numba.model.backend import Backend
from ddtree_numba.model.cache import Cache
from ddtree_numba.model.comm import ThreadGroup, Traffic
from ddtree_numba.model.drafter import Drafter
from ddtree_numba.model.inputs import VerifyInput
from ddtree_numba.model.target import Target


class Rank:
    """Target, drafter and cache of one rank. Every rank runs every call, in the same order."""

    def __init__(self, target: Target, drafter: Drafter | None, cache: Cache, ops: Backend) -> None:
        self.target, self.drafter, self.cache, self.ops = target, drafter, cache, ops
        self.comm = target.comm
        self.used: np.ndarray | None = None  # int64 [layers], see `count_experts`
        # [R,N,K*H] of the last forward, until its accepted rows are committed
        self.taps = np.empty((0, 0, 0))

    def draft(self, roots: np.ndarray, starts: np.ndarray, page_table: np.ndarray) -> np.ndarray:
        """Root tokens [R] at `starts` -> draft logits float32 [R,L,V/W] of this rank's tokens."""
        assert self.drafter is not None
        config = self.drafter.config
        roots, starts, page_table = map(self.ops.array, (roots, starts, page_table))
        block = self.ops.full((len(roots), config.block_size), config.mask_token_id)
        block[:, 0] = roots
        embedded = self.target.embed(block.reshape(-1)).reshape(*block.shape, -1)
        hidden = self.drafter.forward(embedded, starts, page_table, self.cache)
        part = self.target.head(hidden.reshape(-1, hidden.shape[-1]))
        return part.reshape(*hidden.shape[:2], -1)

    def candidates(
        self, roots: np.ndarray, starts: np.ndarray, page_table: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k likeliest tokens of each draft position, and their log-probabilities: [R,L,k]."""
        return self.ops.candidates(self.draft(roots, starts, page_table), k, self.comm)

    def count_experts(self) -> None:
        """From now on `used` counts the different experts that rounds ask for, layer by layer."""
        with self.ops.active():
            self.used = self.ops.xp.zeros(self.target.config.num_hidden_layers, np.int64)

    def forward(
        self, batch: VerifyInput, with_taps: bool, used: np.ndarray | None = None
    ) -> np.ndarray:
        """The target over a batch of trees -> final hidden states [T,H]; keeps taps and rows."""
        layers = self.drafter.config.target_layer_ids if self.drafter and with_taps else ()
        hidden, taps = self.target.forward(self.ops.placed(batch), self.cache, layers, used)
        self.taps = taps.reshape(*batch.tokens.shape, -1)
        return hidden

    def score(
        self, batch: VerifyInput, with_taps: bool, used: np.ndarray | None = None
    ) -> np.ndarray:
        """-> the target's logits of this rank's tokens after every node, float32 [R,N,V/W]."""
        part = self.target.head(self.forward(batch, with_taps, used))
        return part.reshape(*batch.tokens.shape, -1)

    def verify(self, batch: VerifyInput, with_taps: bool) -> np.ndarray:
        """-> the target's logits after every node, float32 [R,N,V]."""
        return self.comm.all_gather(self.score(batch, with_taps))

    def choose(self, batch: VerifyInput, with_taps: bool, draws: Any) -> np.ndarray:
        """-> the token that the target itself puts after every node, int32 [R,N]."""
        part = self.score(batch, with_taps, self.used)
        return self.ops.next_tokens(part, batch, draws, self.comm)

    def commit(
        self, starts: np.ndarray, nodes: np.ndarray, counts: np.ndarray, page_table: np.ndarray
    ) -> None:
        """Keep the first `counts` [R] of path `nodes` [R,D]: cache rows and drafter context."""
        requests, width = len(nodes), self.taps.shape[1]
        scratch = self.cache.rows(requests, width)
        ops = self.ops
        starts, nodes, counts, page_table = map(ops.array, (starts, nodes, counts, page_table))
        ops.cache_commit(self.cache.pages, scratch, page_table, starts, nodes, counts)
        if self.drafter is not None and self.taps.shape[-1]:
            taps = ops.path_rows(self.taps, nodes, counts)
            self.drafter.append(taps, starts, counts, page_table, self.cache)


class Ranks:
    """All ranks of this process, driven as one; all compute the same bits, so rank 0 answers."""

    def __init__(self, ranks: list[Rank], group: ThreadGroup | None) -> None:
        self.ranks, self.group = ranks, group
        self.ops, self.comm = ranks[0].ops, ranks[0].comm

    @property
    def traffic(self) -> Traffic:
        """What a rank has given to the others."""
        return self.comm.traffic

    @property
    def taps(self) -> list[np.ndarray]:
        """Every rank's, of the last forward; a graph that has run puts back where its own lie."""
        return [rank.taps for rank in self.ranks]

    @taps.setter
    def taps(self, taps: list[np.ndarray]) -> None:
        for rank, own in zip(self.ranks, taps, strict=True):
            rank.taps = own

    def finish(self) -> None:
        """Wait until all operations are done; an error between ranks is raised."""
        self.ops.finish()
        self.judge(None if self.comm.faults is None else self.ops.host(self.comm.faults))

    def judge(self, faults: np.ndarray | None) -> None:
        """See `Comm.judge`."""
        self.comm.judge(faults)

    def _all(self, verb: str, *args: object) -> Any:
        def call(rank: int) -> np.ndarray:
            with self.ranks[rank].ops.active():
                return getattr(self.ranks[rank], verb)(*args)

        return call(0) if self.group is None else self.group.run(call)[0]

    def candidates(
        self, roots: np.ndarray, starts: np.ndarray, page_table: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Rank.candidates`."""
        return self._all("candidates", roots, starts, page_table, k)

    def forward(self, batch: VerifyInput, with_taps: bool) -> np.ndarray:
        """See `Rank.forward`."""
        return self._all("forward", batch, with_taps)

    def score(self, batch: VerifyInput, with_taps: bool) -> np.ndarray:
        """See `Rank.score`; rank 0's part."""
        return self._all("score", batch, with_taps)

    def verify(self, batch: VerifyInput, with_taps: bool) -> np.ndarray:
        """See `Rank.verify`."""
        return self._all("verify", batch, with_taps)

    def choose(self, batch: VerifyInput, with_taps: bool, draws: Any) -> np.ndarray:
        """See `Rank.choose`."""
        return self._all("choose", batch, with_taps, draws)

    def commit(
        self, starts: np.ndarray, nodes: np.ndarray, counts: np.ndarray, page_table: np.ndarray
    ) -> None:
        """See `Rank.commit`."""
        self._all("commit", starts, nodes, counts, page_table)
