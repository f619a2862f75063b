"""Rounds ahead of the host, shared, watched and timed: what is kept where, and by whom."""

import gc
import time
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_numba.budget import StepTimes
from ddtree_numba.graph_player import GraphPlayer
from ddtree_numba.graphs import GraphRounds
from ddtree_numba.kernels.row_settings import settings
from ddtree_numba.model.cuda_arrays import CudaArrays
from ddtree_numba.model.cuda_backend import CudaBackend
from ddtree_numba.sampling import SamplingParams
from tests import fake_cupy
from tests.scripted import count_up, scripted_engine, some_right
from tests.test_graphs import PROMPTS, Device, ahead, decode


class Pooled(Device):
    """Notes in which memory arrays are made."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.homes = None, []

    @contextmanager
    def active(self, pool=None):
        outer, self.pool = self.pool, self.pool or pool or "general"
        with super().active():
            yield
        self.pool = outer

    def new_pool(self):
        return "of graphs"

    def array(self, host):
        self.homes.append(self.pool)
        return super().array(host)


def test_two_generators_of_one_engine_take_turns():
    groups, params = [PROMPTS[:2], PROMPTS[2:4]], SamplingParams(max_new_tokens=30)
    graphs = ahead(scripted_engine(count_up, some_right))
    plain = scripted_engine(count_up, some_right)
    turns = {n: graphs.generate(group, params, "ddtree", 16) for n, group in enumerate(groups)}
    answers = [[[] for _ in group] for group in groups]
    while turns:
        for n in list(turns):
            if one := next(turns[n], None):
                answers[n][one.index] += one.token_ids
            else:
                del turns[n]
    assert answers == [decode(plain, group, params)[0] for group in groups]


def test_a_generator_that_fails_does_not_turn_back_another(monkeypatch):
    graphs, params = ahead(scripted_engine(count_up, some_right)), SamplingParams(max_new_tokens=30)
    plain = decode(scripted_engine(count_up, some_right), [[30]], params)[0][0]
    one = graphs.generate([[30]], params, "ddtree", 16)
    tokens = next(one).token_ids
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(graphs.rounds.player, "prepared", lambda *_: 1 / 0)
        next(graphs.generate([[41]], params, "ddtree", 16))
    assert tokens + [token for each in one for token in each.token_ids] == plain


def test_one_without_a_distribution_ends_alone():
    def target(prefix):
        bad = prefix[0] == 41 and len(prefix) > 9
        return np.full(256, np.nan, np.float32) if bad else count_up(prefix)

    params = SamplingParams(max_new_tokens=40)
    graphs = ahead(scripted_engine(target, some_right, max_batch=3))
    plain = scripted_engine(target, some_right, max_batch=3)
    assert decode(graphs, PROMPTS, params) == decode(plain, PROMPTS, params)
    assert decode(graphs, PROMPTS, params)[1].count("error") == 1


@pytest.mark.parametrize("context", [2, 3, 64, 65])
@pytest.mark.parametrize("mode", ["ddtree", "ar"])
def test_a_context_that_is_filled_to_the_last_position(context, mode):
    prompts = [[30 + i] * max(context - 1 - i, 1) for i in range(4)]
    params = SamplingParams(max_new_tokens=500)
    graphs = ahead(scripted_engine(count_up, some_right, max_batch=3, context=context))
    plain = scripted_engine(count_up, some_right, max_batch=3, context=context)
    assert decode(graphs, prompts, params, mode) == decode(plain, prompts, params, mode)
    assert graphs.pages.free_pages == plain.pages.free_pages


def test_seconds_are_those_of_rounds_not_of_the_caller_or_of_prompts():
    graphs = ahead(scripted_engine(count_up, some_right, max_batch=2))
    graphs.ranks.ops.round_seconds = 0.01
    graphs.ranks.ops.finish = lambda: time.sleep(0.05)  # a prompt's, behind its last call
    setups = []
    for one in graphs.generate(PROMPTS[:4], SamplingParams(max_new_tokens=8), "ar"):
        time.sleep(0.05)
        if one.finish_reason:
            assert one.stats.prefill_seconds > 0.05
            stats = one.stats  # the first two rounds made the graph of all others
            assert 0.079 <= stats.decode_seconds + stats.setup_seconds < 0.4
            timed = 6 if stats.setup_seconds else 8
            assert stats.tokens_per_second == timed / stats.decode_seconds
            setups.append(stats.setup_seconds)
    assert setups[0] and not setups[-1]


def test_memory_that_results_are_copied_to_outlives_a_generator():
    graphs = ahead(scripted_engine(count_up, some_right))
    fetched, fetch = [], graphs.ranks.ops.fetch

    def watched(array):
        fetched.append(weakref.ref(out := fetch(array)))
        return out

    graphs.ranks.ops.fetch = watched
    kept = list(graphs.generate(PROMPTS, SamplingParams(max_new_tokens=50), "ddtree", 16))
    gc.collect()
    alive = [n for n, each in enumerate(fetched) if each() is not None]
    assert alive == list(range(len(fetched) - 9, len(fetched)))  # of the round nobody waited for
    decode(graphs, [[30]], SamplingParams(max_new_tokens=5))
    gc.collect()
    assert fetched[alive[0]]() is None and kept


def test_what_rounds_keep_lies_in_no_memory_of_graphs():
    engine = scripted_engine(count_up, some_right, max_batch=3)
    engine.ranks.ops = Pooled()
    engine.rounds = GraphRounds(GraphPlayer(engine.ranks), engine.pages.rows, engine.context)
    decode(engine, PROMPTS, SamplingParams(max_new_tokens=20))
    assert set(engine.ranks.ops.homes) == {"general"}


def test_constants_and_workspaces_lie_in_the_general_pool():
    arrays, used = object.__new__(CudaArrays), ["none"]

    @contextmanager
    def using(pool):
        used.append(pool)
        yield
        used.pop()

    cuda = SimpleNamespace(using_allocator=using)
    arrays.stream, arrays.pool = nullcontext(), SimpleNamespace(malloc="general")
    arrays._active, arrays._constants, arrays._workspaces = False, {}, {}
    arrays.xp = SimpleNamespace(
        cuda=cuda, asarray=lambda host: used[-1], zeros=lambda *_: [used[-1]] * 4
    )
    with arrays.active(SimpleNamespace(malloc="of graphs")):
        assert arrays.array(np.arange(4)) == "of graphs"
        assert arrays.constant(np.arange, 4) == "general"
        assert arrays.workspace("next_token", 4) == ["general"] * 4


def test_a_pool_of_graphs_keeps_what_it_would_free_when_memory_is_short():
    class Memory(str):
        pass

    arrays = object.__new__(CudaArrays)
    pointer, pool = (lambda memory, _: memory), (lambda allocate: allocate)
    cuda = SimpleNamespace(Memory=Memory, MemoryPointer=pointer, MemoryPool=pool)
    arrays.xp = SimpleNamespace(cuda=cuda)
    allocate = arrays.new_pool()
    assert weakref.ref(allocate(512))() == "512"


def test_memory_that_only_loading_needs_is_given_back():
    given, pool = [], lambda name: SimpleNamespace(free_all_blocks=lambda: given.append(name))
    arrays = object.__new__(CudaArrays)
    arrays.stream = SimpleNamespace(synchronize=lambda: given.append("waited"))
    arrays.pool = pool("device")
    arrays.xp = SimpleNamespace(get_default_pinned_memory_pool=lambda: pool("pinned"))
    arrays.placed_all()
    assert given == ["waited", "device", "pinned"]


def test_every_node_draws_as_its_request_does():
    ops = object.__new__(CudaBackend)
    ops.array = lambda host: host
    params = [SamplingParams(), SamplingParams(0.7, top_k=5, top_p=0.9), SamplingParams(1.0)]
    drawn = ops.draws(params, [2**64 - 1, 3, 0], 5)
    for name, wanted in vars(settings([each for each in params for _ in range(5)], 15)).items():
        got = getattr(drawn.settings, name)
        assert np.array_equal(got, wanted) and type(got) is type(wanted)
    assert drawn.seeds.dtype == np.uint64
    assert drawn.seeds.tolist() == [seed for seed in (2**64 - 1, 3, 0) for _ in range(5)]


def test_a_graph_makes_its_own_plan_of_attention(monkeypatch):
    ops, made = object.__new__(CudaBackend), []
    ops.stream = SimpleNamespace(begin_capture=lambda: None, end_capture=lambda: "graph")
    ops._planned, ops.multiprocessors, ops.shared_bytes = (None,) * 4, 4, 100 << 10
    attention = SimpleNamespace(
        resident=lambda *_: 4,
        workspace=lambda *_: {},
        Workspace=object,
        plan_attention=lambda *_, **__: made.append(len(made)),
    )
    monkeypatch.setattr("ddtree_numba.model.cuda_backend.tree_attention", attention)
    step = np.zeros((1, 1)), np.zeros(1), np.zeros((1, 1, 1)), np.ones(1)

    def layers():
        assert ops._attention_plan(*step, 8, 80, 64) is ops._attention_plan(*step, 8, 80, 64)

    layers()
    assert made == [0]
    assert ops.capture(layers) == "graph"
    assert made == [0, 1]  # the captured one is not there yet
    layers()
    assert made == [0, 1, 2]


def test_what_fails_in_a_capture_is_what_is_told():
    def unjoined():
        raise RuntimeError("cudaErrorStreamCaptureUnjoined")

    with fake_cupy.installed():
        ops = CudaBackend()
        ops.stream.end_capture = unjoined
        with pytest.raises(ZeroDivisionError):
            ops.capture(lambda: 1 // 0)
        with pytest.raises(RuntimeError, match="Unjoined"):
            ops.capture(lambda: None)


def test_an_end_or_another_mode_does_not_make_later_trees_small():
    graphs = ahead(scripted_engine(count_up, some_right))
    graphs._times = StepTimes(0.0, (1, 65), (1.0, 1.0))  # all 64 nodes pay
    params = SamplingParams(max_new_tokens=30)
    for mode in ("ddtree", "ar", "ddtree"):
        rounds = [one.round for one in graphs.generate([[30]], params, mode, "auto")]
        assert rounds[0].size == (1 if mode == "ar" else 65)


def test_of_many_graphs_the_latest_are_kept(monkeypatch):
    monkeypatch.setattr("ddtree_numba.graph_player.MOST_GRAPHS", 3)
    graphs = ahead(scripted_engine(count_up, some_right))
    plain = scripted_engine(count_up, some_right)
    params = SamplingParams(max_new_tokens=20)
    for budget in (1, 2, 3, 4, 2, 5, 2):
        answers = [
            [one.token_ids for one in engine.generate(PROMPTS[:1], params, "ddtree", budget)]
            for engine in (graphs, plain)
        ]
        assert sum(answers[0], []) == sum(answers[1], [])
        budgets = [plan.budget for plan, _, _ in graphs.rounds.player.captured]
        assert len(budgets) <= 3 and budget in budgets
    assert 2 in budgets and 5 in budgets


def test_a_profiler_sees_verbs_and_operations_by_name(monkeypatch):
    seen: list[str] = []
    ops = object.__new__(CudaBackend)
    ops._nvtx = SimpleNamespace(RangePush=seen.append, RangePop=lambda: seen.append("end"))
    monkeypatch.setattr("ddtree_numba.model.cuda_backend.linear.linear", lambda *_, out, **__: out)
    ops.xp = SimpleNamespace(empty=np.empty)
    with ops.span("verify"):
        assert ops.linear(np.zeros((1, 64)), np.zeros((8, 64))).shape == (1, 8)
    assert seen == ["verify", "linear", "end", "end"]
    with pytest.raises(ZeroDivisionError), ops.span("commit"):
        seen.append(1 // 0)
    assert seen[-2:] == ["commit", "end"]
    ops._nvtx = None
    with ops.span("draft"):
        pass
    assert len(seen) == 6


def test_work_beside_that_failed_is_not_waited_for():
    with fake_cupy.installed():
        ops = CudaBackend()
        with pytest.raises(ZeroDivisionError), ops.active():
            ops.beside(lambda: 1 // 1)
            raise ZeroDivisionError
        with ops.active():
            assert ops.beside(lambda: 2) == 2
            with pytest.raises(AssertionError, match="one call at a time"):
                ops.beside(lambda: 3)
            ops.rejoin()
            assert ops.beside(lambda: 4) == 4
