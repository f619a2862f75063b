"""What kernels touch before they wait for the kernel ahead; see `simt_launches.py`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba.cuda")

from numba import cuda, int32

from bench.bench_step import Step
from bench.step_rank import build, read_configs
from bench.step_time import Clock
from ddtree_numba import verbs
from ddtree_numba.kernels import attention_plan, linear_narrow, moe_int4, ptx
from ddtree_numba.kernels.arguments import read, write
from ddtree_numba.kernels.launch import kernel
from ddtree_numba.kernels.simt_launches import watched
from ddtree_numba.kernels.simt_threads import Fault

from . import fake_cupy


@kernel(threads=2, pdl=True)
@cuda.jit
def waits_first(x: read(int32), y: write(int32)):
    ptx.wait_for_previous()
    ptx.launch_next()
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x]


@kernel(threads=2, pdl=True)
@cuda.jit
def launches_first(x: read(int32), y: write(int32)):
    ptx.launch_next()
    ptx.wait_for_previous()
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x]


@kernel(threads=2, pdl=True)
@cuda.jit
def reads_first(x: read(int32), y: write(int32)):
    value = x[cuda.threadIdx.x]
    ptx.wait_for_previous()
    ptx.launch_next()
    y[cuda.threadIdx.x] = value


@kernel(threads=2, pdl=True)
@cuda.jit
def one_launches_first(x: read(int32), y: write(int32)):
    if cuda.threadIdx.x == 0:
        ptx.launch_next()
    ptx.wait_for_previous()
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x]


@kernel(threads=2)
@cuda.jit
def plain(x: read(int32), y: write(int32)):
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x]


@pytest.fixture
def abc() -> list[np.ndarray]:
    return [np.arange(2, dtype=np.int32) for _ in range(3)]


@pytest.mark.parametrize("first", [plain, waits_first, launches_first])
def test_results_of_the_kernel_ahead_are_not_there(abc, first):
    a, b, c = abc
    found = f"reads_first touches x ahead of its wait, which {first.name} writes as y"
    with watched(), pytest.raises(Fault, match=found):
        first.launch(1, a, b)
        reads_first.launch(1, b, c)


def test_a_kernel_that_waits_first_vouches_for_those_before_it(abc):
    a, b, c = abc
    with watched():
        waits_first.launch(1, a, b)
        waits_first.launch(1, a, c)
        launches_first.launch(1, a, c)
        reads_first.launch(1, b, c)


@pytest.mark.parametrize("between", [launches_first, one_launches_first])
def test_a_kernel_that_launches_first_does_not(abc, between):
    """Be it by one thread: its block's first call counts."""
    a, b, c = abc
    with watched(), pytest.raises(Fault, match="waits_first writes"):
        waits_first.launch(1, a, b)
        between.launch(1, a, c)
        reads_first.launch(1, b, c)


def test_a_launch_that_is_not_dependent_begins_when_all_have_ended(abc):
    a, b, c = abc
    with watched():
        launches_first.launch(1, a, b)
        plain.launch(1, b, c)
        reads_first.launch(1, b, a)


def test_streams_have_no_order_among_each_other(abc):
    a, b, c = abc
    with watched() as watch, pytest.raises(Fault, match="launches_first writes"):
        launches_first.launch(1, a, b)
        watch.stream = "beside"
        waits_first.launch(1, a, c)
        watch.stream = ""
        reads_first.launch(1, b, c)


def test_a_stream_that_waits_for_another_may_overlap_both(abc):
    a, b, c = abc
    with watched() as watch, pytest.raises(Fault, match="waits_first writes"):
        watch.stream = "beside"
        waits_first.launch(1, a, b)
        watch.stream = ""
        waits_first.launch(1, a, c)
        watch.join("beside")
        reads_first.launch(1, b, c)


# --- the product's launches


@pytest.fixture
def early(monkeypatch):
    """K2.6's linears let the next kernel in first; the embedded model's would vouch for others."""
    monkeypatch.setattr(linear_narrow, "SETTLED", 0)
    linear_narrow.make.cache_clear()
    yield
    linear_narrow.make.cache_clear()


def launches_of_round(folder: Path, nodes: int) -> list[str]:
    """Kernels of a round of the embedded model, cut to two layers, two experts and 64 tokens."""
    with fake_cupy.installed(run=True) as launches, watched() as watch:
        from ddtree_numba.model.cuda_backend import CudaBackend

        class Backend(CudaBackend):
            def beside(self, call: Callable) -> object:
                def on_the_side() -> object:
                    watch.stream = "side"
                    watch.join("")
                    result = call()
                    watch.stream = ""
                    return result

                return super().beside(on_the_side)

            def rejoin(self) -> None:
                if self._beside is not None:
                    watch.join("side")
                super().rejoin()

        ops = Backend()
        ops.multiprocessors = 1
        config, drafter = read_configs(folder, 1, 2)
        config = replace(config, n_routed_experts=2, num_experts_per_tok=1, vocab_size=64)
        drafter = replace(drafter, vocab_size=64, mask_token_id=63)
        ranks, table = build(ops, config, drafter, 1, 40, nodes)
        step = Step(ranks, table, np.ones(1), Clock(ops, 1))
        state, plan = step.state(nodes)
        step.reset(30)
        with ops.active():
            verbs.play(state, ranks, plan)
    return [name for name, _ in launches]


@pytest.mark.usefixtures("early")
def test_a_plain_round_touches_nothing_before_it_is_there(embedded):
    names = launches_of_round(embedded, 1)
    assert names.count("attention_merge_64_1") == 2 and names.count("moe_combine_1_base") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("early")
def test_a_round_with_a_tree_touches_nothing_before_it_is_there(embedded, monkeypatch):
    monkeypatch.setattr(moe_int4, "DIRECT", 1)  # two pairs are grouped
    names = launches_of_round(embedded, 2)
    assert "moe_group_8" in names and any(name.startswith("draft_attention") for name in names)


def test_a_plan_that_no_kernel_has_waited_for_is_found(embedded, monkeypatch):
    monkeypatch.setattr(attention_plan, "plan_ends", launches_first)
    monkeypatch.setattr(launches_first, "launch", lambda *given, **options: None)
    with pytest.raises(Fault, match="tree_attention_.* ahead of its wait, which attention_plan"):
        launches_of_round(embedded, 1)
