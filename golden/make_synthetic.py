"""Write a checkpoint of random numbers in the published form of Kimi K2.6, at any size.

    python golden/make_synthetic.py DIR                       K2.6 itself, 595 GB
    python golden/make_synthetic.py DIR --layers 3            as wide, three layers, 25 GB
    python golden/make_synthetic.py DIR --config golden/tiny --drafter golden/tiny/drafter

Names, shapes, dtypes, INT4 layout, index and shards are the published ones: layer L wholly in shard
L + 1, then a shard with embedding, norm and head, one with the projector and one with the vision
tower, of which a small stand-in each is written. Tokenizer and template make the folder complete.
Every tensor is valid, but matrices repeat a block of 2^24 random numbers: a disk that compresses
would look too fast. Equal options give equal bytes.
"""

import argparse
import contextlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ddtree_numba.model.config import ModelConfig, load_config, load_drafter_config  # noqa: E402
from ddtree_numba.model.fields import CheckpointError, Fields, read_json  # noqa: E402
from ddtree_numba.model.names import drafter_pieces, target_pieces  # noqa: E402
from ddtree_numba.progress import Progress  # noqa: E402
from golden import k26  # noqa: E402
from golden.synthetic_numbers import Numbers, Tensor  # noqa: E402
from golden.synthetic_tokenizer import write_tokenizer  # noqa: E402

SPARE = 1 << 30  # bytes of the disk that stay free
PREFIX = "language_model."
ORDER = ("F32", "I32", "BF16")  # as the safetensors library sorts tensors; then by name
VISION = ("mm_projector.pre_norm.weight", "vision_tower.patch_embed.proj.bias")
WRITTEN = (  # names of all that a folder gets
    "config.json",
    "model-*-of-*.safetensors",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "drafter/config.json",
    "drafter/model.safetensors",
)
Shards = dict[Path, list[Tensor]]  # the tensors of each file, in order


def write(
    folder: Path,
    config: dict[str, Any],
    drafter: dict[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """The folder, which must be new or empty; `drafter` becomes its subfolder of that name.

    CheckpointError, in one line, for a configuration that cannot be, and for lack of room. What was
    written until then is removed: it would be in the way of the next run.
    """
    new = not folder.exists()
    if not new and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: is not an empty folder")
    if seed < 0:
        raise CheckpointError(f"the seed must be at least 0, not {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _fill(folder, config, drafter, seed, progress)
    except BaseException:
        _remove(folder, new)
        raise


def _remove(folder: Path, new: bool) -> None:
    for path in [path for pattern in WRITTEN for path in folder.glob(pattern)]:
        with contextlib.suppress(OSError):
            path.unlink()
    for path in (folder / "drafter", *([folder] if new else [])):
        with contextlib.suppress(OSError):
            path.rmdir()


def _fill(
    folder: Path,
    config: dict[str, Any],
    drafter: dict[str, Any] | None,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    _write_json(folder / "config.json", config)
    model = load_config(folder)
    shards = target_shards(folder, model)
    index = {tensor.name: path.name for path, shard in shards.items() for tensor in shard}
    size = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
    if drafter is not None:
        shards |= _drafter_shard(folder / "drafter", drafter)
    tensors = [tensor for shard in shards.values() for tensor in shard]
    total, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(folder).free
    if total + SPARE > free:
        raise CheckpointError(
            f"{folder}: {total / 1e9:.1f} GB, and {SPARE / 1e9:.1f} to spare, do not fit into"
            f" the {free / 1e9:.1f} GB that are free"
        )
    numbers = Numbers(seed, model.hidden_size, max(tensor.nbytes // 2 for tensor in tensors))
    done = 0
    for path, shard in shards.items():
        for piece in _write_shard(path, shard, numbers):
            done += piece
            if progress is not None:
                progress(done, total)
    write_tokenizer(folder, model.vocab_size)
    listing = {"metadata": {"total_size": size}, "weight_map": index}
    _write_json(folder / "model.safetensors.index.json", listing)  # last: now it is complete


def target_shards(folder: Path, config: ModelConfig) -> Shards:
    """Which file holds what."""
    layers = config.num_hidden_layers
    shards: list[list[Tensor]] = [[] for _ in range(layers + 3)]
    packed: dict[str, tuple[int, int]] = {}
    for piece in target_pieces(config):
        module, _, part = piece.name.rpartition(".")
        if part == "weight_packed":
            packed[module] = piece.shape[0], 8 * piece.shape[1]
        full = packed[module] if part == "weight_shape" else None
        words = piece.name.split(".")
        number = int(words[2]) if words[1] == "layers" else layers
        shards[number].append(Tensor(PREFIX + piece.name, piece.dtype, piece.shape, full))
    for number, name in enumerate(VISION, layers + 1):
        shards[number].append(Tensor(name, "BF16", (1152,)))
    return {
        folder / f"model-{i:05d}-of-{layers + 3:06d}.safetensors": sorted(
            shard, key=lambda tensor: (ORDER.index(tensor.dtype), tensor.name)
        )
        for i, shard in enumerate(shards, 1)
    }


def _drafter_shard(folder: Path, config: dict[str, Any]) -> Shards:
    folder.mkdir()
    _write_json(folder / "config.json", config)
    pieces = drafter_pieces(load_drafter_config(folder))
    tensors = [Tensor(piece.name, piece.dtype, piece.shape) for piece in pieces]
    return {folder / "model.safetensors": tensors}


def _write_shard(path: Path, tensors: list[Tensor], numbers: Numbers) -> Iterator[int]:
    """One file, under another name until it is complete; yields the bytes of each write."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.nbytes]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:
                for piece in numbers.pieces(tensor):
                    file.write(piece)
                    yield len(piece)
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def resized(
    config: dict[str, Any],
    layers: int | None,
    experts: int | None,
    path: Path = Path("config.json"),
) -> dict[str, Any]:
    """The same configuration with fewer layers and experts; CheckpointError names `path`."""
    top = Fields(config, path)
    text = top.section("text_config") or top
    values = config if text is top else config["text_config"]
    for option, key, count in (
        ("--layers", "num_hidden_layers", layers),
        ("--experts", "n_routed_experts", experts),
    ):
        if count is None:
            continue
        most = text.integer(key)
        if not 1 <= count <= most:
            raise CheckpointError(f"{option} {count}: {key} can be 1 to {most}")
        values[key] = count
    if experts is not None:
        values["num_experts_per_tok"] = min(text.integer("num_experts_per_tok"), experts)
    return config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, help="new or empty")
    add("--config", metavar="DIR", type=Path, help="folder of a config.json (default: K2.6's)")
    add("--drafter", metavar="DIR", type=Path, help="folder of a drafter's config.json, for one")
    add("--layers", type=int, metavar="N", help="up to the configuration's")
    add("--experts", type=int, metavar="N", help="up to the configuration's")
    add("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args(argv)
    try:
        path = (options.config or Path()) / "config.json"
        config = read_json(path) if options.config else k26.config()
        config = resized(config, options.layers, options.experts, path)
        drafter = read_json(options.drafter / "config.json") if options.drafter else None
        with Progress("writing", "B", sys.stderr) as progress:
            write(options.folder, config, drafter, options.seed, progress)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
