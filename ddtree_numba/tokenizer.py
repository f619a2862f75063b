"""Text <-> token ids, as Kimi K2 publishes them: byte-level BPE ranks and 256 control tokens.

id in [0, base)           tiktoken.model: one line `base64(bytes) rank` an ordinary token
id in [base, base + 256)  control tokens: tokenizer_config.json `added_tokens_decoder`,
                          else `<|reserved_token_ID|>`
"""

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tiktoken

from ddtree_numba.model.fields import CheckpointError, read_json

CONTROL_TOKENS = 256
# The published tokenizer encodes text in such slices; ids depend on where they end.
MAX_TEXT = 400_000
MAX_RUN = 25_000  # characters in a row that are all white space, or all not

STOP_NAMES = ("[EOS]", "<|im_end|>", "[EOT]")  # by name: their ids differ between checkpoints
# Shown to the reader although they are control tokens (`"special": false` in the published file).
VISIBLE = re.compile(r"</?think>|<\|tool_call\w*\|>")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """The vocabulary of one checkpoint.

    | field      | meaning                                                            |
    |------------|--------------------------------------------------------------------|
    | specials   | name -> id of every control token                                  |
    | hidden_ids | control tokens that give no text ([PAD], <|im_end|>; not </think>) |
    | stop_ids   | end an answer: the ids configured, and [EOS] <|im_end|> [EOT]      |
    """

    ranks: dict[bytes, int]
    specials: dict[str, int]
    hidden_ids: frozenset[int]
    stop_ids: frozenset[int]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read tiktoken.model and tokenizer_config.json; CheckpointError names what is wrong."""
        folder = Path(folder)
        ranks = read_ranks(folder / "tiktoken.model")
        added = _optional_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        specials, hidden = _control_tokens(added, len(ranks))
        stops = {specials[name] for name in STOP_NAMES if name in specials}
        stops |= _configured_stops(folder, len(ranks), len(ranks) + CONTROL_TOKENS)
        return cls(ranks, specials, hidden | stops, frozenset(stops))

    @property
    def vocab_size(self) -> int:
        return len(self.ranks) + len(self.specials)

    def id_of(self, name: str) -> int:
        """The id of a control token, by name."""
        if name not in self.specials:
            raise CheckpointError(f"the tokenizer has no control token {name}")
        return self.specials[name]

    def name_of(self, token_id: int) -> str | None:
        """The name of a control token; None for an ordinary one."""
        return self._names.get(token_id)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`; names of control tokens in it are ordinary text unless `allow_special`."""
        if not allow_special:
            return self._encode_plain(text)
        ids: list[int] = []
        for piece in self.split_specials(text):
            ids += [self.specials[piece]] if piece in self.specials else self._encode_plain(piece)
        return ids

    def split_specials(self, text: str) -> list[str]:
        """`text` cut before and after each name of a control token."""
        return [piece for piece in self._special_names.split(text) if piece]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a control token's are its name."""
        if token_id in self._names:
            return self._names[token_id].encode()
        if not 0 <= token_id < len(self.ranks):
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._encoding.decode_single_token_bytes(token_id)

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of all tokens, names of control tokens included."""
        return b"".join(map(self.token_bytes, token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """What a reader sees: no hidden control tokens, U+FFFD where bytes are no UTF-8."""
        visible = [token_id for token_id in token_ids if token_id not in self.hidden_ids]
        return self.decode_bytes(visible).decode("utf-8", "replace")

    @cached_property
    def _names(self) -> dict[int, str]:
        return {token_id: name for name, token_id in self.specials.items()}

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        longest_first = sorted(self.specials, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=self.ranks, special_tokens=self.specials
        )

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in slices(text):
            ids += self._encoding.encode_ordinary(piece)
        return ids


def slices(text: str) -> Iterator[str]:
    """`text` as the published tokenizer cuts it: at MAX_TEXT, inside runs longer than MAX_RUN."""
    for first in range(0, len(text), MAX_TEXT):
        part = text[first : first + MAX_TEXT]
        begin = 0
        for run in re.finditer(r"\s+|\S+", part):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """tiktoken.model -> rank of each token's bytes.

    Parsed here because tiktoken's own reader keeps copies by path and serves them after a change.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if token in ranks or int(rank) < 0:
                raise ValueError
            ranks[token] = int(rank)
        except ValueError:
            raise CheckpointError(
                f"{path}, line {number}: not one new `base64 rank` pair: {line[:60]!r}"
            ) from None
    if set(ranks.values()) != set(range(len(ranks))):
        raise CheckpointError(f"{path}: ranks must be 0 .. {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{path}: no token for the single byte {missing[0]:#04x}")
    return ranks


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _control_tokens(added: dict[str, Any], base: int) -> tuple[dict[str, int], frozenset[int]]:
    """(name -> id, ids that give no text) of control tokens, which follow `base` ordinary ones."""
    ids = range(base, base + CONTROL_TOKENS)
    names = {token_id: f"<|reserved_token_{token_id}|>" for token_id in ids}
    hidden = set(ids)
    for key, entry in added.items():
        where = f"tokenizer_config.json: added_tokens_decoder[{key!r}]"
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise CheckpointError(f"{where} has no content")
        if not key.isdecimal() or int(key) not in ids:
            raise CheckpointError(f"{where}: control tokens have ids {base} .. {ids[-1]}")
        names[int(key)] = content
        if VISIBLE.fullmatch(content) or not entry.get("special", True):
            hidden.discard(int(key))
    specials = {name: token_id for token_id, name in names.items()}
    if len(specials) < len(names):
        raise CheckpointError("tokenizer_config.json: two control tokens have the same content")
    return specials, frozenset(hidden)


def _configured_stops(folder: Path, base: int, size: int) -> set[int]:
    """eos_token_id of generation_config.json and config.json: absent, an int or a list."""
    stops: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = _optional_json(folder / name)
        for section in (config, config.get("text_config") or {}):
            value = section.get("eos_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is None:
                    continue
                if not isinstance(token_id, int) or not base <= token_id < size:
                    raise CheckpointError(
                        f"{folder / name}: eos_token_id {token_id!r} is no control token of"
                        f" tiktoken.model ({base} .. {size - 1})"
                    )
                stops.add(token_id)
    return stops
