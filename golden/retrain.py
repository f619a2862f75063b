"""Make the embedded checkpoint: `python golden/retrain.py --stdlib DIR --out DIR`.

Ten minutes on one GPU. `--phase` runs some of the phases (tokenizer, corpus, target, drafter,
evaluate) on what earlier ones left.
"""

import argparse
import datetime
import json
import platform
import shutil
import sys
from pathlib import Path

try:
    import corpus
    import dataset
    import numpy as np
    import prompts
    import tokenizer_training
    import torch
    import train_drafter
    import train_target
    from evaluate import tokens_per_round
    from export import export_drafter, export_target
    from stored import load_drafter, load_target
except ImportError as error:
    sys.exit(f"retrain.py: {error}; pip install -e . torch tiktoken safetensors regex")

PHASES = ("tokenizer", "corpus", "target", "drafter", "evaluate")
HERE = Path(__file__).parent


def main() -> None:
    args = _arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.config.cache_size_limit = 64  # one entry a layer kind and width
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    texts = corpus.read_library(args.stdlib) if args.stdlib else {}
    if "tokenizer" in args.phase:
        train = [text for name, text in texts.items() if not corpus.is_held_out(name)]
        tokenizer_training.write(tokenizer_training.train(train), args.out)
    if "corpus" in args.phase:
        _corpus(texts, args)
    if "target" in args.phase:
        data = dataset.load(args.work / "corpus.npz", device)
        model, log = train_target.train(data, args.target_seconds, device, args.rows)
        export_target(model, args.out)
        _log(args.out, target=log, machine=_machine(device))
    if "drafter" in args.phase:
        data = dataset.load(args.work / "corpus.npz", device)
        sizes = (args.batch, args.new_tokens)
        drafter, log = train_drafter.train(
            load_target(args.out, device), data, args.drafter_seconds, device, *sizes
        )
        export_drafter(drafter, args.out / "drafter")
        _log(args.out, drafter=log)
    if "evaluate" in args.phase:
        _evaluate(args, device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--stdlib", type=Path, help="CPython's Lib folder (3.11.7), for tokenizer and corpus"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--work", type=Path, default=Path("build/retrain"), help="the corpus as token ids"
    )
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--target-seconds", type=float, default=160)
    parser.add_argument("--drafter-seconds", type=float, default=280)
    parser.add_argument(
        "--rows", type=int, default=train_target.ROWS, help="rows of a step of the target"
    )
    parser.add_argument(
        "--batch", type=int, default=train_drafter.BATCH, help="continuations of a batch"
    )
    parser.add_argument("--new-tokens", type=int, default=train_drafter.NEW_TOKENS)
    parser.add_argument(
        "--prompts", type=int, default=256, help="held-out prompts of the evaluation"
    )
    args = parser.parse_args()
    if not args.stdlib and {"tokenizer", "corpus"} & set(args.phase):
        parser.error("the phases tokenizer and corpus need --stdlib")
    return args


def _corpus(texts: dict[str, str], args: argparse.Namespace) -> None:
    encoding = tokenizer_training.read(args.out)
    arrays = dataset.encode(texts, encoding)
    statistics = prompts.statistics(texts, encoding, args.prompts)
    golden = prompts.golden(texts, encoding)
    prompts.write(golden, args.work / "prompts.jsonl")
    code = [prompts.encode(p, encoding) for p in golden if str(p["name"]).startswith("code")]
    chat = [prompts.encode(p, encoding) for p in golden if p["chat"]]
    (args.work / "evaluation.json").write_text(
        json.dumps({"random": statistics, "golden": code, "chat": chat})
    )
    np.savez_compressed(args.work / "corpus.npz", **arrays)
    held_out = {name: len(text) for name, text in texts.items() if corpus.is_held_out(name)}
    summary = {
        "files": len(texts),
        "characters": sum(map(len, texts.values())),
        "sha256": corpus.data_hash(texts),
        "tokens": {name: len(ids) for name, ids in arrays.items() if ids.dtype == np.uint16},
        "conversations": len(arrays["train_chat_starts"]),
        "held_out": held_out,
    }
    _log(args.out, corpus=summary)
    template = HERE / "tiny" / "chat_template.jinja"
    if args.out.resolve() != template.parent.resolve():
        shutil.copy(template, args.out)


def _evaluate(args: argparse.Namespace, device: str) -> None:
    target, drafter = load_target(args.out, device), load_drafter(args.out / "drafter", device)
    sets = json.loads((args.work / "evaluation.json").read_text())
    results = {}
    for name, items in sets.items():
        results[name] = tokens_per_round(target, drafter, items[: args.prompts], 128, device)
        print(name, results[name], flush=True)
    _log(args.out, tokens_per_round=results)


def _machine(device: str) -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "device": gpu,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "date": today,
    }


def _log(folder: Path, **entries: object) -> None:
    path = folder / "training_log.json"
    log = json.loads(path.read_text()) if path.exists() else {}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in (log | entries).items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
