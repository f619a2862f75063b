"""Broken checkpoints on purpose: write a config, expect one line that refuses it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_numba.model.config import CheckpointError

Edit = Callable[[dict[str, Any]], Any]


def write(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def refusal(call: Callable[[], Any], file: str = "config.json") -> str:
    """The message of a refusal, which must be one line and name the file."""
    with pytest.raises(CheckpointError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and file in message, message
    return message
