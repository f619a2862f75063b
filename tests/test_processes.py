"""Ranks as processes over loopback, on the embedded model: the tokens of one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_numba import processes
from ddtree_numba.engine import Engine
from ddtree_numba.fingerprint import BLOCK, fingerprint
from ddtree_numba.model.checkpoint import INDEX
from tests.answers import LINES, decode, sampling
from tests.command import ROOT, run
from tests.process_runs import APART, PROMPT, Run, free_port, launched
from tests.test_golden import SURE

SHARD = "model-00004-of-000007.safetensors"


def golden_file(folder: Path, lines: list[dict]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"token_ids": one["prompt_ids"]}) + "\n" for one in lines))
    return path


def decoded(folder: Path, lines: list[dict], *argv: str, limit: float = 60) -> list[list[int]]:
    """Token ids of golden prompts, by the command."""
    source, output = golden_file(folder, lines), folder / "out.jsonl"
    ran = Run("--input", str(source), "--output", str(output), "--ignore-eos", *argv)
    code, out, err = ran.end(limit)
    lines_of_err = [line for line in err.splitlines() if not line.startswith("prompts: ")]
    assert (code, out) == (0, "") and len(lines_of_err) == 1, err  # all ranks print once
    records = {one["index"]: one for one in map(json.loads, output.read_text().splitlines())}
    return [records[index]["token_ids"] for index in range(len(lines))]


def check_golden(got: list[list[int]], lines: list[dict]) -> None:
    """Free running in float32: equal up to the first step that is not sure."""
    for tokens, line in zip(got, lines, strict=True):
        unsure = [step for step, gap in enumerate(line["gaps"]) if gap <= SURE["float32"]]
        held = min(len(tokens), *unsure[:1]) if unsure else len(tokens)
        assert held > 8 and tokens[:held] == line["tokens"][:held], line["name"]


def test_two_processes_decode_golden_prompts(tmp_path):
    lines = LINES[:4]
    argv = ["--dtype", "float32", "--max-new-tokens", "32", "--budget", "8", *APART]
    check_golden(decoded(tmp_path, lines, *argv), lines)


def test_tokens_are_those_of_ranks_as_threads(tmp_path, embedded):
    """The automatic budget too: its step times are rank 0's."""
    lines = LINES[4:6]
    got = decoded(tmp_path, lines, "--max-new-tokens", "24", *APART)
    engine = Engine.load(embedded, backend="numpy", tp=2)
    prompts = [line["prompt_ids"] for line in lines]
    assert got == decode(engine, prompts, sampling(None, 24), "ar")


@pytest.mark.parametrize(
    "file",
    ["config.json", INDEX, "tiktoken.model", SHARD, "drafter/model.safetensors"],
)
def test_s34_a_byte_of_another_folder_is_noticed(tmp_path, embedded, file: str):
    folder = shutil.copytree(embedded, tmp_path / "model")
    before = fingerprint(folder, None)
    assert before == fingerprint(embedded, None)
    content = bytearray((folder / file).read_bytes())
    if file.endswith(".json"):
        content += b" "
    else:
        content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    assert fingerprint(folder, None) != before


def test_s34_of_a_large_shard_header_ends_and_blocks_are_compared(tmp_path, embedded):
    size = 1 << 30  # a sparse file
    begin = 8 + 2
    for at in (None, 9, begin, begin + BLOCK - 1, size - BLOCK, size - 1, begin + BLOCK):
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write((2).to_bytes(8, "little") + b"{}")
            file.truncate(size)
            if at is None:
                same = fingerprint(tmp_path, None)
                continue
            file.seek(at)
            file.write(b"!")
        found = fingerprint(tmp_path, None)
        assert (found != same) == (at != begin + BLOCK), at  # that one lies between two blocks


def test_s34_ranks_with_other_weights_are_refused(tmp_path, embedded):
    stale = shutil.copytree(embedded, tmp_path / "stale")
    content = bytearray((stale / SHARD).read_bytes())
    content[-2] ^= 1
    (stale / SHARD).write_bytes(content)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    runs = [
        Run(*PROMPT, "--model", str(folder), env=shared | {"RANK": rank, "LOCAL_RANK": "0"})
        for rank, folder in (("0", embedded), ("1", stale))
    ]
    leader, other = (ran.end() for ran in runs)
    complaint = f"{stale} or its drafter holds another configuration, vocabulary or weights"
    assert leader == (1, "", f"error: rank 1: {complaint} than rank 0's\n") and other[0] == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 8])
def test_processes_decode_all_golden_prompts(tmp_path, world: int):
    argv = ["--dtype", "float32", "--max-new-tokens", "64", "--budget", "16"]
    argv += ["--ranks", "processes", "--tp", str(world)]
    check_golden(decoded(tmp_path, LINES, *argv, limit=1500), LINES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_processes_equal_autoregressive_decoding_and_hold_equal_tokens():
    env = {"DDTREE_NUMBA_CHECK_RANKS": "1"}
    argv = ["--ranks", "processes", "--tp", "8", "--check", "--json"]
    code, out, err = Run(*PROMPT, *argv, env=env).end()
    assert code == 0 and "check: 40 tokens equal" in err and out.count("\n") == 1


def test_a_launcher_starts_the_ranks():
    runs = launched(2, *PROMPT, "--verbose")
    (code, out, err), follower = (ran.end() for ran in runs)
    assert follower == (0, "", "")
    assert (
        code == 0 and out.startswith("\nimport unittest") and "\nranks: 2; a round: 23.0 c" in err
    )


def hosts(names: list[str]) -> None:
    """Two network namespaces, joined by a cable; each its own loopback."""
    a, b = names
    for line in (
        *(f"netns add {name}" for name in names),
        f"link add {a} netns {a} type veth peer name {b} netns {b}",
        *(f"-n {name} addr add 10.93.7.{i}/24 dev {name}" for i, name in enumerate(names, 1)),
        *(f"-n {name} link set {name} up" for name in names),
    ):
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ip") is None or os.getuid() != 0, reason="needs root and ip")
def test_ranks_on_two_hosts():
    names = [f"ddt{os.getpid()}{letter}" for letter in "ab"]
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "10.93.7.1", "MASTER_PORT": "29400"}
    try:
        hosts(names)
        runs = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    sys.executable,
                    "-m",
                    "ddtree_numba.generate",
                    *PROMPT,
                ],
                cwd=ROOT,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": "0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        (out, err), other = (ran.communicate(timeout=60) for ran in runs)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    assert [ran.returncode for ran in runs] == [0, 0] and other == ("", "")
    assert out.startswith("\nimport unittest") and err.startswith("length: 40 tokens")


@pytest.mark.parametrize(
    ("env", "argv", "message"),
    [
        ({}, "--ranks processes", "--ranks has no effect without --tp"),
        ({}, "--ranks streams --tp 2", "invalid choice: 'streams'"),
        ({}, "--fast-allreduce", "--fast-allreduce has no effect without a GPU for each"),
        ({}, "--fast-allreduce --backend numpy", "effect with --backend numpy"),
        ({}, "--shard-latents", "--shard-latents has no effect on one rank"),
        ({}, "--shard-latents --tp 8", "--tp 8: q_lora_rank 96 / tp 8 = 12 is not a multiple of 8"),
        ({}, "--fast-allreduce --tp 2", "--fast-allreduce has no effect without a GPU"),
        ({"RANK": "0"}, "", "RANK is set, so WORLD_SIZE must be too"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "--tp 2", "--tp 2, but WORLD_SIZE 3"),
        ({"RANK": "0"}, "--tp 2 --ranks threads", "--ranks has no effect where RANK is set"),
        ({"DDTREE_NUMBA_CHECK_RANKS": "x"}, "", "DDTREE_NUMBA_CHECK_RANKS must be a number of"),
        ({"DDTREE_NUMBA_MEETING": "x"}, "", "MEETING must be one of device, host, nccl, not 'x'"),
        ({"DDTREE_NUMBA_RANK_SECONDS": "x"}, "", "DDTREE_NUMBA_RANK_SECONDS must be a number"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(monkeypatch, capsys, env, argv, message):
    if len(env) == 2 or "--ranks" in argv and env:
        env = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"} | env
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ran = run(monkeypatch, capsys, "x", *argv.split())
    assert ran.code == 2 and message in ran.err and ran.out == ""


def test_descriptors_left_in_the_environment_reach_no_rank():
    env = {"DDTREE_NUMBA_NEWS": "99999", "DDTREE_NUMBA_LISTENER": "99998"}
    code, out, err = Run("x", "--max-new-tokens", "1", *APART, env=env).end()
    assert code == 0 and err.count("\n") == 1 and "DDTREE" not in err


def test_what_can_be_refused_is_refused_before_a_rank_starts(monkeypatch, capsys):
    monkeypatch.setattr(processes, "launch", lambda *_: pytest.fail("ranks are started"))
    ran = run(monkeypatch, capsys, "x", "--tp", "3", "--ranks", "processes")
    assert ran.code == 2 and ran.err.startswith("error: --tp 3: num_attention_heads 8 / tp 3")
    assert ran.err.count("\n") == 1


def test_a_signal_while_ranks_start_ends_those_that_have(monkeypatch, capsys):
    start, started = subprocess.Popen, []

    def popen(*args, **named):
        started.append(start(["sleep", "60"]))
        signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    ran = run(monkeypatch, capsys, "x", "--tp", "4", "--ranks", "processes")
    assert (ran.code, ran.err) == (143, "interrupted before anything was decoded\n")
    assert [one.returncode for one in started] == [-signal.SIGKILL]
