"""The three files of tokenizer and chat format, for a vocabulary of any size."""

import base64
import json
import shutil
from pathlib import Path

from golden.shapes import BASE

TINY = Path(__file__).resolve().parent / "tiny"
CONTROL_TOKENS = 256


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tiktoken.model with every byte, then pairs, then triples; control tokens and template as
    published, after `vocab_size` - 256 ordinary tokens."""
    base = vocab_size - CONTROL_TOKENS
    tokens = (*_of_length(1), *_of_length(2, base - 256), *_of_length(3, base - 256 - 65536))
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {str(int(i) - BASE + base): each for i, each in added.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(TINY / "chat_template.jinja", folder / "chat_template.jinja")


def _of_length(length: int, most: int = 256) -> list[bytes]:
    """The first strings of so many bytes."""
    count = min(max(most, 0), 256**length)
    return [number.to_bytes(length, "big") for number in range(count)]
