"""Byte-level BPE in tiktoken's format with K2.6's pattern and special tokens.

A token's rank is its id: 256 bytes first, then merges in the order in which training found them.
Encoding merges the adjacent pair whose concatenation has the lowest rank, and so does training
after every new token.
"""

import base64
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import regex
import tiktoken

from ddtree_numba.tokenizer import PATTERN, read_ranks

BASE_RANKS = 1792
SPECIALS = 256
# Offsets from the first special id, as in K2.6; ids in between are reserved tokens.
NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
KEPT_IN_TEXT = (11, 12, 13, 14, 15, 22, 23)  # tool and thought marks stay visible: special = false


def train(texts: Iterable[str], size: int = BASE_RANKS) -> dict[bytes, int]:
    """Token -> rank. The most frequent pair becomes the next token; ties: the smaller bytes."""
    split = regex.compile(PATTERN, regex.V1)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split.findall(text))
    ranks = {bytes([b]): b for b in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in counts]
    times = list(counts.values())
    pairs: Counter[bytes] = Counter()
    where: defaultdict[bytes, set[int]] = defaultdict(set)
    for i, word in enumerate(words):
        for pair in _pairs(word):
            pairs[pair] += times[i]
            where[pair].add(i)
    heap = [(-n, pair) for pair, n in pairs.items()]
    heapq.heapify(heap)
    while len(ranks) < size:
        count, token = heapq.heappop(heap)
        if token in ranks or -count != pairs[token]:
            continue
        ranks[token] = len(ranks)
        changed = set()
        for i in where.pop(token):
            for pair in _pairs(words[i]):
                pairs[pair] -= times[i]
                changed.add(pair)
            words[i] = merge(words[i], ranks)
            for pair in _pairs(words[i]):
                pairs[pair] += times[i]
                where[pair].add(i)
                changed.add(pair)
        for pair in changed:
            heapq.heappush(heap, (-pairs[pair], pair))
    return ranks


def merge(parts: list[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    """Join the adjacent pair of lowest rank, leftmost first, until no pair is a token."""
    parts = list(parts)
    while True:
        best = min((ranks.get(p, len(ranks)), i) for i, p in enumerate([*_pairs(parts), b""]))
        if best[0] == len(ranks):
            return parts
        i = best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def _pairs(parts: list[bytes]) -> list[bytes]:
    return [a + b for a, b in zip(parts, parts[1:], strict=False)]


def special_tokens(base: int) -> dict[str, int]:
    return {NAMES.get(i, f"<|reserved_token_{base + i}|>"): base + i for i in range(SPECIALS)}


def write(ranks: dict[bytes, int], folder: Path) -> None:
    """tiktoken.model and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    base = len(ranks)
    added = {
        str(base + i): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": i not in KEPT_IN_TEXT,
        }
        for i, name in NAMES.items()
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [NAMES[i] for i in (2, 3, 4, 6, 7, 9, 10, 17, 18, 19, 20, 21)],
        "bos_token": NAMES[0],
        "clean_up_tokenization_spaces": False,
        "eos_token": NAMES[1],
        "extra_special_tokens": {},
        "model_max_length": 2048,
        "pad_token": NAMES[255],
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": NAMES[254],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def read(folder: Path) -> tiktoken.Encoding:
    ranks = read_ranks(folder / "tiktoken.model")
    specials = special_tokens(len(ranks))
    return tiktoken.Encoding(
        "tiny", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials
    )
