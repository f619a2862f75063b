"""What is checked while a checkpoint is loaded, beside what each of its files must hold."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from ddtree_numba import backends, load
from ddtree_numba.engine import Engine
from ddtree_numba.model.fields import CheckpointError


@pytest.fixture
def copy(embedded, tmp_path):
    """A copy of the embedded checkpoint, to be changed."""
    return shutil.copytree(embedded, tmp_path / "model")


def test_a_tokenizer_of_fewer_tokens_than_the_model_is_refused(copy):
    ranks = (copy / "tiktoken.model").read_text().splitlines()
    (copy / "tiktoken.model").write_text("\n".join(ranks[:-60]) + "\n")
    for name in ("tokenizer_config.json", "generation_config.json"):
        (copy / name).unlink()
    config = json.loads((copy / "config.json").read_text())
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = 1733
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the tokenizer has 1988 tokens, config.json a voc"):
        Engine.load(copy)


def test_s31_a_drafter_of_another_size_is_refused(copy):
    path = copy / "drafter" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 4096}))
    with pytest.raises(CheckpointError) as error:
        Engine.load(copy)
    target = copy / "config.json"
    assert str(error.value) == f"{path}: vocab_size is 4096, the target has 2048 ({target})"


@pytest.mark.parametrize(
    "driver, dtype, tp, wanted",
    [
        (True, "bfloat16", 1, "cuda"),
        (False, "bfloat16", 1, "numpy"),
        (True, "float32", 1, "numpy"),
        (True, "bfloat16", 2, "numpy"),
    ],
)
def test_backend_auto_is_cuda_where_it_can_run(driver, dtype, tp, wanted, monkeypatch):
    cuda = SimpleNamespace(CudaBackend=lambda index: SimpleNamespace(name="cuda"))
    monkeypatch.setitem(sys.modules, "ddtree_numba.model.cuda_backend", cuda)
    monkeypatch.setattr(backends, "visible_gpus", lambda: 1)
    monkeypatch.setattr(backends, "has_driver", lambda: driver)
    opened = backends.open_backends("auto", dtype, tp)
    assert [each.name for each in opened] == [wanted] * tp


@pytest.mark.parametrize("late", [False, True])
def test_backend_auto_is_numpy_without_a_device(late, monkeypatch):
    def none(*_):
        raise RuntimeError("no NVIDIA device is visible")

    cuda = SimpleNamespace(CudaBackend=none)
    monkeypatch.setitem(sys.modules, "ddtree_numba.model.cuda_backend", cuda)
    monkeypatch.setattr(backends, "has_driver", lambda: True)
    monkeypatch.setattr("ddtree_numba.kernels.driver.visible", (lambda: 1) if late else none)
    notes: list[str] = []
    (opened,) = backends.open_backends("auto", "bfloat16", 1, notes.append)
    assert opened.name == "numpy"
    assert notes == ["backend 'cuda': no NVIDIA device is visible; numpy is used instead"]
    with pytest.raises(ValueError, match="backend 'cuda': no NVIDIA device is visible"):
        backends.open_backends("cuda", "bfloat16")


@pytest.mark.parametrize("block, refused", [(16, False), (17, True)])
def test_a_block_that_cuda_cannot_take_is_refused(block, refused):
    pytest.importorskip("numba.cuda")
    drafter = SimpleNamespace(num_attention_heads=64, num_key_value_heads=8, block_size=block)
    if not refused:
        return load.check_block(drafter)
    with pytest.raises(CheckpointError, match="block_size 17: backend 'cuda' takes up to 16"):
        load.check_block(drafter)


def test_what_cuda_does_not_do_is_refused():
    with pytest.raises(ValueError, match="computes in bfloat16, not in float32: use 'numpy'"):
        backends.open_backends("cuda", "float32")


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddtree_numba.model.cuda_backend", None)
    with pytest.raises(ValueError, match="install the extra cu13"):
        backends.open_backends("cuda", "bfloat16")
