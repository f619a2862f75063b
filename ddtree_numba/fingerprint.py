"""Do ranks that are processes read the same checkpoint? A digest tells, in seconds at any size."""

import hashlib
import os
from pathlib import Path

from ddtree_numba.load import drafter_folder
from ddtree_numba.model.checkpoint import HEADER_LIMIT, INDEX, shard_files

SHARED = ("config.json", INDEX, "tiktoken.model")  # files that are compared as a whole
BLOCK, BLOCKS = 1 << 16, 16  # bytes; of a shard's tensors, spread evenly from first to last
WHOLE = 1 << 22  # bytes of a shard that is compared as a whole


def fingerprint(folder: Path, drafter: str | Path | None) -> str:
    """Of the configurations, vocabulary and weights that ranks must share.

    Of each shard: name, size, header and a sample, so that it takes seconds at any size.
    """
    found = hashlib.blake2b(digest_size=16)
    for one in (folder, drafter_folder(folder, drafter)):
        if one is None:
            continue
        for path in (one / name for name in SHARED):
            if path.is_file():
                _add(found, path, path.read_bytes())
        for path in shard_files(one):
            _add(found, path, _sample(path))
    return found.hexdigest()


def _add(found: "hashlib.blake2b", path: Path, content: bytes) -> None:
    found.update(f"{path.name} {path.stat().st_size} {len(content)}\n".encode())
    found.update(content)


def _sample(path: Path) -> bytes:
    """A shard's header, and `BLOCKS` blocks of the tensors behind it; a small one as a whole."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE:
            return file.read()
        head = file.read(8)
        first = min(8 + int.from_bytes(head, "little"), 8 + HEADER_LIMIT, size)
        pieces = [head, os.pread(file.fileno(), max(first - 8, 0), 8)]
        room = max(size - first - BLOCK, 0)
        for turn in range(BLOCKS):
            at = first + room * turn // (BLOCKS - 1)
            pieces.append(os.pread(file.fileno(), BLOCK, at))
    return b"".join(pieces)
