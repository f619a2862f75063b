"""A checkpoint folder without weights: tokens are bytes, words of choice and control tokens."""

import base64
import json
from pathlib import Path

# Offsets from the first control token, as in Kimi K2.6.
NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    17: "<|im_middle|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}

TEMPLATE = """\
{%- set markers = {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'} -%}
{%- for message in messages -%}
  {{ markers.get(message.role, '<|im_system|>') }}{{ message.name or message.role }}<|im_middle|>
  {{- message.content }}<|im_end|>
{%- endfor -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>{{ '<think>' if thinking else '<think></think>' }}
{%- endif -%}
"""


def write_ranks(folder: Path, words: tuple[str, ...] = ()) -> None:
    """tiktoken.model: token i is byte i, then `words`."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("".join(lines))


def toy_folder(
    folder: Path,
    words: tuple[str, ...] = (),
    names: dict[int, str] | None = None,
    eos: int | list[int] | None = None,
) -> Path:
    """Tokenizer, template and generation_config; control tokens start at 256 + len(words)."""
    base = 256 + len(words)
    write_ranks(folder, words)
    added = {
        str(base + offset): {"content": name, "special": "think" not in name and "tool" not in name}
        for offset, name in (NAMES if names is None else names).items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder
