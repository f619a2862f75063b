"""The corpus as token ids: one long stream of files, one of chats, and the held-out files apart."""

from pathlib import Path

import corpus
import numpy as np
import tiktoken
import torch
from shapes import EOS
from torch import Tensor


def encode(texts: dict[str, str], encoding: tiktoken.Encoding) -> dict[str, np.ndarray]:
    """uint16 streams in which [EOS] ends every document, and where documents start. No [BOS]."""
    streams: dict[str, list[int]] = {
        n: [] for n in ("train", "train_chat", "held_out", "held_out_chat")
    }
    starts: dict[str, list[int]] = {n: [] for n in streams}

    def append(name: str, ids: list[int]) -> None:
        starts[name].append(len(streams[name]))
        streams[name] += [*ids, EOS]

    held_out_bytes = 0
    for path, text in texts.items():
        part = "held_out" if corpus.is_held_out(path) else "train"
        held_out_bytes += len(text.encode()) if part == "held_out" else 0
        append(part, encoding.encode_ordinary(text))
        for turns in corpus.conversations(path, text):
            append(f"{part}_chat", encode_chat(encoding, turns))
    arrays = {name: np.array(ids, np.uint16) for name, ids in streams.items()}
    arrays |= {f"{name}_starts": np.array(at, np.int64) for name, at in starts.items()}
    return arrays | {"held_out_bytes": np.array(held_out_bytes)}


def encode_chat(
    encoding: tiktoken.Encoding, turns: list[corpus.Turn], generate: bool = False
) -> list[int]:
    return encoding.encode(corpus.render(turns, generate), allowed_special="all")


def load(path: Path, device: str) -> dict[str, Tensor]:
    """Streams and starts as int64 tensors on the device."""
    with np.load(path) as arrays:
        return {
            name: torch.from_numpy(arrays[name].astype(np.int64)).to(device)
            for name in arrays.files
        }


def rows(stream: Tensor, starts: Tensor, width: int) -> Tensor:
    """[B, width] pieces of the stream from `starts`; a start too near the end moves forward."""
    at = starts.clamp(max=len(stream) - width)
    return stream[at.unsqueeze(-1) + torch.arange(width, device=stream.device)]
