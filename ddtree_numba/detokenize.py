"""Text of an answer while it is being made: no broken characters, no stop strings.

    text(ids) = utf8(bytes(ids)), cut before the stop string that is completed first

Texts that `push` and `flush` return, joined, are that text, however the tokens arrive. What could
still change is held back: the first bytes of a character, an ending that may become a stop string.
"""

import codecs

from ddtree_numba.tokenizer import Tokenizer


class Detokenizer:
    """One answer. After a stop string `stopped` is True and no more text comes."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        if any(not text for text in stop):
            raise ValueError("a stop string must not be empty")
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        # Keeps an unfinished character; replaces what can no longer become one.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        """Text that this token makes safe to show. Hidden control tokens give none."""
        if self.stopped or token_id in self.tokenizer.hidden_ids:
            return ""
        return self._take(self._decoder.decode(self.tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The rest, once no token follows; U+FFFD for a character that was cut."""
        if self.stopped:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _take(self, text: str) -> str:
        text = self._held + text
        cut = first_stop(text, self.stop)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        keep = len(text) - open_stop(text, self.stop)
        self._held = text[keep:]
        return text[:keep]


def first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the stop string that ends first in `text` begins; the longer of two ending there."""
    found = [(begin + len(s), begin) for s in stop if (begin := text.find(s)) >= 0]
    return min(found)[1] if found else None


def open_stop(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest ending of `text` that begins a stop string."""
    longest = min(len(text), max(map(len, stop), default=0))
    for length in range(longest, 0, -1):
        if any(s.startswith(text[-length:]) for s in stop):
            return length
    return 0
