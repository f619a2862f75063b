"""Held-out prompts: prompts.jsonl for golden tokens, and random ones for statistics."""

import json
import random
from pathlib import Path

import corpus
import tiktoken
from dataset import encode_chat

SEED = 3
UNICODE = (
    "# Größen und Maße\ndef fläche(länge, breite):\n"
    '    """Berechnet die Fläche in m²."""\n    return ',
    'GREETINGS = {\n    "ja": "こんにちは、世界",\n    "ru": "Привет, мир",\n'
    '    "el": "Γειά σου Κόσμε",\n}\n\n\ndef greet(language',
    'STATUS = {"ok": "✅", "failed": "❌", "party": "🎉👩‍💻"}\n\n\nclass Report:\n'
    '    """Prints results — with emoji 🙂."""\n\n    def __init__(self',
)
Prompt = dict[str, str | bool]


def golden(texts: dict[str, str], encoding: tiktoken.Encoding) -> list[Prompt]:
    """34 pieces of code of 40 to 300 tokens, 2 longer than YaRN's original length, 3 with
    Unicode, 6 chats."""
    pick = random.Random(SEED)
    files = [n for n in texts if corpus.is_held_out(n) and len(texts[n]) > 1500]
    library = [n for n in files if not corpus.is_test(n)]
    tests = [n for n in files if corpus.is_test(n)]
    found: list[Prompt] = []
    for i in range(34):
        name = library[i % len(library)] if i < 26 else pick.choice(tests)
        found.append(_piece(f"code-{i:02d}", texts[name], encoding, pick, pick.randint(40, 300)))
    for i in range(2):
        name = max(library, key=lambda n: len(texts[n])) if i else "copy.py"
        found.append(_piece(f"long-{i}", texts[name], encoding, pick, (420, 680)[i]))
    found += [
        {"name": f"unicode-{i}", "text": text, "chat": False} for i, text in enumerate(UNICODE)
    ]
    asked = [t[-2]["content"] for n in library for t in corpus.conversations(n, texts[n])]
    found += [
        {"name": f"chat-{i}", "text": text, "chat": True}
        for i, text in enumerate(pick.sample(asked, 6))
    ]
    return found


def _piece(
    name: str, text: str, encoding: tiktoken.Encoding, pick: random.Random, tokens: int
) -> Prompt:
    """Text from the start of a random line, about `tokens` tokens long, cut anywhere."""
    lines = text.splitlines(keepends=True)
    while True:
        ids = encoding.encode_ordinary("".join(lines[pick.randrange(len(lines)) :]))
        cut = encoding.decode(ids[:tokens], errors="replace")
        if len(ids) > tokens and encoding.encode_ordinary(cut) == ids[:tokens]:
            return {"name": name, "text": cut, "chat": False}


def statistics(
    texts: dict[str, str], encoding: tiktoken.Encoding, count: int = 256
) -> list[list[int]]:
    """Token ids of random pieces of the held-out library files, 40 to 300 tokens each."""
    pick = random.Random(SEED + 1)
    files = {
        n: encoding.encode_ordinary(t)
        for n, t in texts.items()
        if corpus.is_held_out(n) and not corpus.is_test(n)
    }
    files = {n: ids for n, ids in files.items() if len(ids) > 500}
    found = []
    for name in pick.choices(list(files), [len(ids) for ids in files.values()], k=count):
        ids, length = files[name], pick.randint(40, 300)
        start = pick.randrange(len(ids) - length)
        found.append(ids[start : start + length])
    return found


def encode(prompt: Prompt, encoding: tiktoken.Encoding) -> list[int]:
    """As the command does: the text alone, or a user's turn and the answer's opening. No [BOS]."""
    text = str(prompt["text"])
    if not prompt["chat"]:
        return encoding.encode_ordinary(text)
    return encode_chat(encoding, [{"role": "user", "content": text}], generate=True)


def write(prompts: list[Prompt], path: Path) -> None:
    path.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts))


def read(path: Path) -> list[Prompt]:
    return [json.loads(line) for line in path.read_text().splitlines()]
