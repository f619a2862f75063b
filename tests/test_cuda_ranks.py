"""Tensor parallel on GPUs: ranks as streams of one process, and as processes.

Processes have a GPU each where there are enough; else they share one and take turns.
"""

import json

import pytest

from ddtree_numba.engine import Engine

from .answers import LINES, PROMPTS, decode, sampling
from .process_runs import Run, faulty
from .test_cuda_engine import check_bits
from .test_golden import SURE, check_steps

pytestmark = pytest.mark.gpu

SIZES = (2, 4, 8)
TOKENS = 40
DRAFTS = [("ddtree", 1), ("ddtree", 16), ("ddtree", 65), ("ddtree", "auto"), ("chain", "auto")]


@pytest.fixture(scope="module", params=SIZES, ids=lambda tp: f"tp{tp}")
def streams(embedded, request) -> Engine:
    return Engine.load(embedded, backend="cuda", tp=request.param, max_batch=8)


def test_golden_tokens_at_every_sure_step(streams, record_property):
    steps, _, turned = check_steps(streams, LINES[:16], SURE["bfloat16"])
    record_property(
        "summary",
        f"GPU, {streams.ranks.comm.world} ranks, golden tokens: {steps} steps,"
        f" {len(turned)} turned, the largest lead of these {max(turned, default=0):.3f}",
    )


def test_s09_speculation_changes_no_token_where_latents_are_cut(embedded):
    streams = Engine.load(embedded, backend="cuda", tp=2, max_batch=8, shard_latents=True)
    params = sampling(None, TOKENS)
    plain = [decode(streams, [prompt], params, "ar", 0)[0] for prompt in PROMPTS[:8]]
    for draft in DRAFTS:
        assert decode(streams, PROMPTS[:8], params, *draft) == plain


@pytest.mark.parametrize("seed", [None, 1])
def test_s09_speculation_changes_no_token_on_several_ranks(streams, seed):
    params = sampling(seed, TOKENS)
    plain = [decode(streams, [prompt], params, "ar", 0)[0] for prompt in PROMPTS[:8]]
    for draft in DRAFTS:
        assert decode(streams, PROMPTS[:8], params, *draft) == plain
        assert decode(streams, PROMPTS[:1], params, *draft) == plain[:1]


def test_s09_logits_of_a_tree_are_plain_bits_on_several_ranks(streams):
    assert check_bits(streams, PROMPTS[3], sampling(None, 16), 16)


def test_all_ranks_hold_the_same_hidden_states(streams):
    decode(streams, PROMPTS[:3], sampling(None, TOKENS), "ddtree", 16)
    streams.ranks.finish()
    first, *others = (
        rank.ops.host(taps)
        for rank, taps in zip(streams.ranks.ranks, streams.ranks.taps, strict=True)
    )
    assert first.size and all(other.tobytes() == first.tobytes() for other in others)


def gpus() -> int:
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


def environment(tp: int, **more: str) -> dict[str, str]:
    shared = {} if gpus() >= tp else {"DDTREE_NUMBA_SHARED_GPUS": "1"}
    return shared | dict(DDTREE_NUMBA_CHECK_RANKS="3", NCCL_NVLS_ENABLE="0") | more


@pytest.mark.parametrize("tp", [2, 4])
def test_processes_decode_as_streams_do(tp, embedded, tmp_path, record_property):
    lines, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts = PROMPTS[:8]
    lines.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts))
    run = Run(
        *("--backend", "cuda", "--tp", str(tp), "--input", str(lines), "--output", str(answers)),
        *("--max-new-tokens", str(TOKENS), "--ignore-eos", "--check", "--verbose", "--debug"),
        env=environment(tp),
    )
    code, out, err = run.end(150)
    assert code == 0, err
    got = [json.loads(line) for line in answers.read_text().splitlines()]
    got.sort(key=lambda record: record["index"])
    streams = Engine.load(embedded, backend="cuda", tp=tp, max_batch=8)
    wanted = decode(streams, prompts, sampling(None, TOKENS), "ar")
    assert [record["token_ids"] for record in got] == wanted
    record_property("summary", f"{tp} processes on {min(gpus(), tp)} GPUs: {err.splitlines()[-2:]}")


@pytest.mark.parametrize("point", ["load", "prefill", "verify"])
def test_c02_a_rank_that_dies_on_a_gpu_ends_the_run(point):
    run = faulty(1, point, "kill", "--backend", "cuda", env=environment(2))
    code, _, err = run.end(90)
    assert (code, err) == (1, "error: rank 1 was killed by SIGKILL\n")
    assert run.seconds < 60
