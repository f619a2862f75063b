"""The command on the embedded model: seeds, checks, chat, plan."""

import json

import pytest

from ddtree_numba.load import EMBEDDED
from ddtree_numba.tokenizer import Tokenizer
from tests.checkpoints import drafter_config
from tests.command import run
from tests.refusals import write

SAMPLED = ["--temperature", "1", "--max-new-tokens", "20", "--ignore-eos", "--budget", "8"]


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *argv: run(monkeypatch, capsys, *argv)


def test_s17_seeds_decide_and_are_reported(command):
    def ids(*argv: str) -> list[int]:
        return command("a b c", "--json", *SAMPLED, *argv).json["token_ids"]

    assert ids("--seed", "1") == ids("--seed", "1")
    assert len({tuple(ids("--seed", str(seed))) for seed in range(1, 6)}) > 1
    first, second = (command("a b c", "--json", *SAMPLED).json for _ in range(2))
    assert first["seed"] != second["seed"] and first["token_ids"] != second["token_ids"]
    assert ids("--seed", str(first["seed"])) == first["token_ids"]
    ran = command("a b c", *SAMPLED)
    assert int(ran.err.rsplit("; seed ", 1)[1]) >= 0


def test_s17_a_seed_means_the_same_in_any_position(command, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(text) + "\n" for text in ("a b c", "x", "a b c", "y z")))
    ran = command("--input", str(source), "--output", str(output), "--seed", "1", *SAMPLED)
    assert ran.code == 0
    records = {one["index"]: one for one in map(json.loads, output.read_text().splitlines())}
    alone = command("a b c", "--json", "--seed", "1", *SAMPLED).json
    assert records[0]["token_ids"] == records[2]["token_ids"] == alone["token_ids"]
    output.unlink()
    command("--input", str(source), "--output", str(output), *SAMPLED)
    assert len({json.loads(line)["seed"] for line in output.read_text().splitlines()}) == 4


@pytest.mark.parametrize(
    "argv",
    [
        "--budget 16",
        "--mode chain",
        "--temperature 0.8 --top-p 0.95 --top-k 40 --min-p 0.01 --budget 7",
        "--stop ( --budget 5",
        "--chat --system Short. --dtype float32",
    ],
)
def test_check_holds_on_the_embedded_model(command, argv):
    ran = command("def fibonacci(n):", "--check", "--max-new-tokens", "24", *argv.split())
    assert ran.code == 0 and " equal to autoregressive decoding" in ran.err


def test_streamed_text_is_the_text_of_the_ids(command, embedded):
    one = command("def f(", "--json", "--max-new-tokens", "40", "--ignore-eos").json
    ran = command("def f(", "--max-new-tokens", "40", "--ignore-eos", "--mode", "ar")
    assert ran.out == one["text"] == Tokenizer.load(embedded).decode(one["token_ids"])
    assert one["rounds"] * one["tokens_per_round"] == pytest.approx(one["completion_tokens"])


def test_s26_total_length_reaches_exactly_the_context(command):
    text = "a\x01" * 1020
    one = command(text, "--json", "--max-new-tokens", "100", "--ignore-eos", "--budget", "32").json
    assert (one["prompt_tokens"], one["completion_tokens"]) == (2040, 8)
    assert one["finish_reason"] == "length"


def test_plan_needs_no_weights(command, embedded, tmp_path):
    ran = command("--plan")
    assert ran.code == 0 and "routed experts" in ran.out and ran.err == ""
    (tmp_path / "config.json").write_bytes((embedded / "config.json").read_bytes())
    ran = command("--plan", "--model", str(tmp_path), "--tp", "8", "--card-gib", "24")
    assert ran.code == 0 and "24.00 GiB" in ran.out and "drafter taps" not in ran.out


@pytest.mark.parametrize("way", ["x", "--plan"])
def test_a_drafter_that_does_not_fit_is_named_with_its_target(command, tmp_path, way):
    ran = command(way, "--drafter", str(write(tmp_path, drafter_config())))
    sizes = "hidden_size is 64, the target has 192"
    line = f"{tmp_path / 'config.json'}: {sizes} ({EMBEDDED / 'config.json'})"
    assert ran.code == 1 and ran.out == "" and ran.err == f"error: {line}\n"


@pytest.mark.parametrize("way", ["x", "--input none --output none", "--plan"])
@pytest.mark.parametrize(
    "argv, message",
    [
        ("--model none", "--model none: no such folder"),
        ("--model pyproject.toml", "--model pyproject.toml: no such folder"),
        ("--drafter none", "--drafter none: no such folder"),
        ("--tp 3", "--tp 3: num_attention_heads 8 / tp 3 = 2.7 is not whole"),
    ],
)
def test_options_that_cannot_be_met_are_usage_errors(command, monkeypatch, way, argv, message):
    monkeypatch.setattr("ddtree_numba.prepare.Command.encoder", None)  # not reached
    ran = command(*way.split(), *argv.split())
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert ran.err.startswith(f"error: {message}")


@pytest.mark.parametrize("tp", ["1", "2"])
def test_a_backend_that_is_not_there_is_a_usage_error(command, tp):
    ran = command("x", "--backend", "cuda", "--tp", tp)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert ran.err.startswith("error: --backend 'cuda'")


@pytest.mark.parametrize(
    "change, message",
    [
        (None, "config.json: no such file"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers must be an integer"),
        ({"moe_intermediate_size": 48, "quantization_config": None}, "tp that works: none"),
    ],
)
@pytest.mark.parametrize("tp", ["1", "2"])
def test_what_the_checkpoint_holds_is_no_usage_error(
    command, embedded, tmp_path, change, message, tp
):
    if change is not None:
        config = json.loads((embedded / "config.json").read_text())
        config["text_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config))
    ran = command("--plan", "--model", str(tmp_path), "--tp", tp)
    assert ran.code == 1 and ran.out == "" and message in ran.err and ran.err.count("\n") == 1


def test_debug_shows_where_an_error_came_from(command, tmp_path):
    ran = command("x", "--model", str(tmp_path), "--debug")
    assert ran.code == 1 and "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("ranks", [[], ["--tp", "2"]])
def test_packed_weights_are_written_once_and_give_the_same_answer(command, tmp_path, ranks):
    argv = ["import os", "--max-new-tokens", "12", "--cache", str(tmp_path / "kept"), *ranks]
    first = command(*argv)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()}
    assert len(files) == 2 * (len(ranks) or 1)  # target and drafter of each rank
    again = command(*argv)
    assert first.code == again.code == 0 and first.out == again.out
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()}


def test_packed_weights_need_a_folder(command, tmp_path):
    (tmp_path / "file").touch()
    ran = command("x", "--cache", str(tmp_path / "file"))
    assert (ran.code, ran.err) == (2, f"error: --cache {tmp_path / 'file'}: is no folder\n")
    ran = command("x", "--cache", "y" * 300)
    assert (ran.code, ran.err) == (2, f"error: --cache {'y' * 300}: File name too long\n")


def test_a_damaged_file_of_packed_weights_is_a_line(command, tmp_path):
    argv = ["x", "--max-new-tokens", "4", "--quiet", "--cache", str(tmp_path / "kept")]
    first = command(*argv)
    (path,) = (tmp_path / "kept").glob("tiny-*.packed")
    path.write_bytes(path.read_bytes()[:-1])
    again = command(*argv)
    assert again.out == first.out and again.err.startswith(f"{path}: cut short")
    assert again.err.count("\n") == 1 and command(*argv).err == ""
