"""Write golden_tokens.jsonl, golden_trees.npz and golden_provenance.json from the oracle.

    python golden/make_golden.py            needs the `oracle` extra; some minutes on two cores

| file                   | content                                                          |
|------------------------|------------------------------------------------------------------|
| golden_tokens.jsonl    | a prompt a line: name, chat, prompt_ids, tokens, gaps            |
| golden_trees.npz       | NAME.prompt, .tokens, .parents [N-1], .logits float32[N, V]      |
| golden_provenance.json | versions, seed, SHA-256 of the checkpoint and of the prompts     |

`tokens` are the greedy continuation, past any stop token; `gaps` say by how much each one's logit
leads the next best. Nodes of a tree are those of `Engine.logits`: node 0 is the last prompt token.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ddtree_numba.chat import Chat  # noqa: E402
from ddtree_numba.tokenizer import Tokenizer  # noqa: E402

CHECKPOINT = HERE / "tiny"
PROMPTS = HERE / "prompts.jsonl"
TOKENS = HERE / "golden_tokens.jsonl"
TREES = HERE / "golden_trees.npz"
PROVENANCE = HERE / "golden_provenance.json"

DECISIVE = ("config.json", "*.safetensors", "tiktoken.model", "tokenizer_config.json", "*.jinja")
STEPS = 64
SEED = 20261129
TREE_SIZES = {"root": 1, "chain": 8, "bushy": 17, "random": 33, "wide": 33}
CANDIDATES = 8  # a node's children come from the oracle's own most probable tokens


def checkpoint_hash(folder: Path = CHECKPOINT) -> str:
    """SHA-256 over name and content, in order of name, of all that decides about a token."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in DECISIVE for path in folder.glob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read_prompts() -> list[dict]:
    """prompts.jsonl with `prompt_ids`: raw text, or one user turn in the chat format."""
    tokenizer = Tokenizer.load(CHECKPOINT)
    chat = Chat.load(CHECKPOINT, tokenizer)
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    for prompt in prompts:
        message = {"role": "user", "content": prompt["text"]}
        ids = chat.render([message]) if prompt["chat"] else tokenizer.encode(prompt["text"])
        prompt["prompt_ids"] = ids
    return prompts


def continuation(oracle, prompt: dict) -> dict:
    """The line of one prompt in golden_tokens.jsonl."""
    tokens, gaps = oracle.greedy(prompt["prompt_ids"], STEPS)
    known = {key: prompt[key] for key in ("name", "chat", "prompt_ids")}
    return known | {"tokens": tokens, "gaps": [round(gap, 6) for gap in gaps]}


def grow(oracle, shape: str, prompt: list[int], rng) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a tree: no two siblings alike, tokens that the oracle finds probable."""
    paths, tokens, parents = [prompt], [], []
    children: dict[int, int] = {}
    while len(paths) < TREE_SIZES[shape]:
        parent = {
            "chain": len(paths) - 1,
            "wide": 0,
            "bushy": len(tokens) // 3,
            "random": int(rng.integers(len(paths))),
        }[shape]
        rank = children[parent] = children.get(parent, -1) + 1
        if rank >= CANDIDATES and shape != "wide":
            continue
        token = int(np.argsort(-oracle.logits(paths[parent])[-1], kind="stable")[rank])
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    return tokens, parents


def make_trees(oracle, prompts: list[dict]) -> dict[str, np.ndarray]:
    """The arrays of golden_trees.npz; one tree each on the shortest and on spread-out prompts."""
    rng = np.random.default_rng(SEED)
    by_length = sorted((prompt["prompt_ids"] for prompt in prompts), key=len)
    arrays = {}
    for number, shape in enumerate(TREE_SIZES):
        prompt = by_length[number * (len(by_length) - 1) // (len(TREE_SIZES) - 1)]
        tokens, parents = grow(oracle, shape, prompt, rng)
        arrays[f"{shape}.prompt"] = np.array(prompt, np.int32)
        arrays[f"{shape}.tokens"] = np.array(tokens, np.int32)
        arrays[f"{shape}.parents"] = np.array(parents, np.int32)
        arrays[f"{shape}.logits"] = oracle.tree_logits(prompt, tokens, parents)
    return arrays


def provenance() -> dict:
    """What the golden files were made from."""
    return {
        "checkpoint_sha256": checkpoint_hash(),
        "prompts_sha256": hashlib.sha256(PROMPTS.read_bytes()).hexdigest(),
        "seed": SEED,
        "dtype": "float32",
        "versions": None,
    }


def main() -> None:
    try:
        from golden.oracle import Oracle, versions
    except ImportError as error:
        sys.exit(f'make_golden.py: {error}; pip install -e ".[oracle]"')
    record = provenance() | {"versions": versions()}
    oracle = Oracle(CHECKPOINT)
    prompts = read_prompts()
    with TOKENS.open("w") as file:
        for number, prompt in enumerate(prompts, 1):
            line = continuation(oracle, prompt)
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            print(f"{number}/{len(prompts)} {line['name']}: least gap {min(line['gaps']):.4f}")
    np.savez_compressed(TREES, **make_trees(oracle, prompts))
    PROVENANCE.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
