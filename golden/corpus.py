"""The training text: CPython's standard library, as files and as short chats about its functions.

Paths are relative to the library folder. A hash of the path alone decides which files are held
out, so the split survives any change of the text; training reads no held-out file.
"""

import ast
import hashlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

EXCLUDED = (
    "site-packages/",
    "encodings/",
    "pydoc_data/",
    "config-",
    "_sysconfigdata",
    "lib2to3/tests/data/",
)
HELD_OUT_ONE_IN = 32
CHAT_CHARACTERS = 2400  # longest answer, about 700 tokens
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You write Python.",
    "You are a Python programmer. Answer with code.",
)
WITH_DOC = (
    "Write {name}{args}: {doc}",
    "Write a {kind} {name}{args}. {doc}",
    "Implement the {kind} {name}{args} in Python. {doc}",
    "{doc} Call the {kind} {name}.",
    "Write a {kind} for this: {doc}",
)
WITHOUT_DOC = (
    "Write {name}{args}.",
    "Write a {kind} {name}{args}.",
    "Implement the {kind} {name}{args} in Python.",
)

Turn = dict[str, str]


def read_library(folder: Path) -> dict[str, str]:
    """Path -> text of every Python file that is UTF-8, tables and generated files left out."""
    texts = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name.startswith(EXCLUDED):
            continue
        try:
            texts[name] = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def is_test(name: str) -> bool:
    return bool({"test", "tests", "idle_test"} & set(name.split("/")))


def data_hash(texts: dict[str, str]) -> str:
    """sha256 over path, zero byte, text, zero byte of all files in order."""
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()


def conversations(name: str, text: str) -> Iterator[list[Turn]]:
    """Requests for the functions and classes of a file, answered with the code; some in pairs."""
    pending: list[Turn] = []
    for turns in _requests(name, text):
        pick = _pick(turns[0]["content"])
        if pending:
            yield pending + turns
            pending = []
        elif pick % 6 == 0:
            pending = turns
        elif pick % 6 == 1:
            system = SYSTEM_PROMPTS[pick // 6 % len(SYSTEM_PROMPTS)]
            yield [{"role": "system", "content": system}, *turns]
        else:
            yield turns
    if pending:
        yield pending


def _requests(name: str, text: str) -> Iterator[list[Turn]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        doc = (ast.get_docstring(node) or "").split("\n")[0].strip()
        if not doc and (is_test(name) or isinstance(node, ast.ClassDef)):
            continue
        code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).strip("\n")
        if len(code) > CHAT_CHARACTERS or code.count("\n") < 2:
            continue
        is_class = isinstance(node, ast.ClassDef)
        words = {
            "name": node.name,
            "args": "" if is_class else f"({ast.unparse(node.args)})",
            "kind": "class" if is_class else "function",
            "doc": doc,
        }
        styles = WITH_DOC if doc else WITHOUT_DOC
        request = styles[_pick(name + node.name) % len(styles)].format(**words)
        yield [{"role": "user", "content": request}, {"role": "assistant", "content": code}]


def _pick(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:4], "big")


def render(turns: list[Turn], generate: bool = False) -> str:
    """Turns in K2.6's format with empty thoughts; `generate` appends the opening of an answer."""
    text = ""
    for turn in turns:
        role = turn["role"]
        marker = role if role in ("user", "assistant") else "system"
        thought = "<think></think>" if role == "assistant" else ""
        text += f"<|im_{marker}|>{role}<|im_middle|>{thought}{turn['content']}<|im_end|>"
    return text + "<|im_assistant|>assistant<|im_middle|><think></think>" if generate else text
