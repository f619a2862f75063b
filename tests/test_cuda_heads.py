"""Candidates and tokens of a vocabulary in shards: ranks as threads, and as streams of one GPU."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from ddtree_numba.kernels.draft_topk import instances as draft_kernels
from ddtree_numba.kernels.next_token import instances as token_kernels
from ddtree_numba.kernels.row_settings import settings
from ddtree_numba.model.comm import ThreadGroup
from ddtree_numba.model.cuda_heads import gather_over, sharded_next_token, sharded_topk
from ddtree_numba.spec.draft_topk import draft_topk
from ddtree_numba.spec.next_token import SamplingParams, next_token
from ddtree_numba.spec.numerics import F32

from .peer_streams import captured, peer_streams

PARAMS = {"greedy": SamplingParams(), "drawn": SamplingParams(temperature=0.7)}


class Arrays:
    """What the functions ask of a backend; `workspace` is passed on from call to call."""

    def __init__(self, empty, zeros):
        self.empty, self.zeros, self.made = empty, zeros, {}

    def workspace(self, operation, words, kind=None):
        key = operation, kind
        if key not in self.made or len(self.made[key]) < words:
            self.made[key] = self.zeros(words, np.int64)
        return self.made[key]


def on_threads(world, logits, call):
    """call(part, first_id, gather, ops) of every rank; what each got."""
    group, width = ThreadGroup(world), logits.shape[-1] // world

    def work(rank):
        def gather(x, joined=False):
            parts = group.exchange(rank, x.copy())
            return np.concatenate(parts, axis=-1) if joined else np.stack(parts)

        first = rank * width
        part = np.ascontiguousarray(logits[..., first : first + width])
        ops = Arrays(np.empty, np.zeros)
        return [call(part, first, gather, ops) for _ in range(2)]  # the workspace serves again

    return [found for pair in group.run(work) for found in pair]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)


def drawn_at(rows, rng):
    """Positions and seeds."""
    return np.arange(rows) + 2**33, rng.integers(0, 2**64, rows, np.uint64)


def logits_of(rows, vocabulary, rng):
    """Ties across shards; a NaN in one shard, a shard without a finite logit."""
    logits = (rng.standard_normal((rows, vocabulary)) * 3).astype(F32).round(1)
    logits[0] = 0
    logits[1, vocabulary // 2 :] = -np.inf
    logits[2, -1] = np.nan
    return logits


def test_candidates_are_those_of_whole_rows(rng):
    logits = logits_of(3, 48, rng)[None]

    def call(part, first, gather, ops):
        return sharded_topk(part, 7, first, gather, ops)

    for found in on_threads(2, logits, call):
        assert_same(found, draft_topk(logits, 7))


@pytest.mark.parametrize("world, params", [(2, PARAMS["drawn"]), (8, PARAMS["greedy"])])
def test_tokens_are_those_of_whole_rows(world, params, rng):
    logits, positions, seeds = logits_of(3, 64, rng), *drawn_at(3, rng)
    draws = SimpleNamespace(seeds=seeds, settings=settings(params, 3))
    expected = next_token(logits, positions, seeds, params)
    assert expected[2] == -1

    def call(part, first, gather, ops):
        return sharded_next_token(part, positions, draws, first, gather, ops)

    for found in on_threads(world, logits, call):
        assert found.dtype == np.int32 and np.array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
def test_gpu_heads_of_k26_are_those_of_whole_rows(world, request, rng):
    """All of them in one graph of each rank, three times: candidates, tokens, whole logits."""
    import cupy

    rows, vocabulary = 17, 163_840
    logits, positions, seeds = logits_of(rows, vocabulary, rng), *drawn_at(rows, rng)
    width = vocabulary // world
    for kernel in (*draft_kernels(), *token_kernels()):
        kernel.ready()
    with peer_streams(request.config) as make:
        found, graphs = [], []
        for memory in (memories := make(world)):
            with memory.stream:
                ops = carved(cupy.zeros(1 << 26, np.uint8))
                gather, first = gather_over(memory.peers, ops), memory.rank * width
                part = cupy.asarray(np.ascontiguousarray(logits[:, first : first + width]))
                at, own_seeds = cupy.asarray(positions), cupy.asarray(seeds)
                draws = [
                    SimpleNamespace(seeds=own_seeds, settings=on_device(settings(p, rows)))
                    for p in PARAMS.values()
                ]
            results = []
            found.append(results)

            def work(part=part, at=at, draws=draws, rest=(first, gather, ops), out=results):
                out += sharded_topk(part[None], 64, *rest)
                out += [sharded_next_token(part, at, each, *rest) for each in draws]
                out.append(rest[1](part, joined=True))

            memory.stream.synchronize()
            graphs.append(captured(memory, work))
        for _ in range(3):
            for memory, graph in zip(memories, graphs, strict=True):
                graph.launch(memory.stream)
        for memory in memories:
            memory.stream.synchronize()
            assert memory.peers.failure() is None
        expected = list(draft_topk(logits[None], 64))
        expected += [next_token(logits, positions, seeds, p) for p in PARAMS.values()]
        expected.append(logits)
        for results in found:
            assert_same([each.get() for each in results], expected)
        graphs.clear()


def on_device(made):
    import cupy

    names = ("temperature", "top_k", "share", "min_p")
    return replace(made, **{name: cupy.asarray(getattr(made, name)) for name in names})


def carved(memory):
    """Arrays that lie one behind the other: nothing is allocated while ranks wait."""
    at = 0

    def empty(shape, dtype):
        nonlocal at
        begin, size = at, int(np.prod(shape)) * np.dtype(dtype).itemsize
        at += -(-size // 256) * 256
        return memory[begin : begin + size].view(dtype).reshape(shape)

    return Arrays(empty, empty)
