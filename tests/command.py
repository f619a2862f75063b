"""Running the command inside the test process."""

import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ddtree_numba.engine import Engine
from ddtree_numba.generate import main
from ddtree_numba.tokenizer import Tokenizer
from tests.scripted import scripted_engine
from tests.toys import toy_folder

decode = Engine.generate  # before any test replaces it
ROOT = Path(__file__).resolve().parents[1]


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on standard output."""
        assert self.code == 0 and self.out.endswith("\n") and self.out.count("\n") == 1, self
        return json.loads(self.out, parse_constant=refuse_constant)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Stdin(io.TextIOWrapper):
    """Standard input that holds bytes; a terminal refuses to be read."""

    def __init__(self, data: bytes | None) -> None:
        super().__init__(io.BytesIO(data or b""))
        self.terminal = data is None

    def isatty(self) -> bool:
        return self.terminal


def run(monkeypatch, capsys, *argv: str, stdin: bytes | None = None) -> Ran:
    """Exit code and what was written; without `stdin`, standard input is a terminal."""
    monkeypatch.setattr(sys, "stdin", Stdin(stdin))
    capsys.readouterr()
    try:
        code = main(list(argv))
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return Ran(code, out, err)


def scripted_command(
    monkeypatch, parent: Path, answer: list, *, words: tuple[str, ...] = ()
) -> Path:
    """A new folder in `parent`, for --model, whose model answers every prompt with `answer`.

    An item is a token id, a row of logits, or a function called for its token. The drafter knows
    the ids beforehand, so that several tokens are accepted in a round. After the end it repeats.
    """
    folder = parent / f"model{len(list(parent.iterdir()))}"
    folder.mkdir()
    toy_folder(folder, words)
    base = 256 + len(words)
    config = json.loads((ROOT / "golden/tiny/config.json").read_text())
    for section in (config, config["text_config"]):
        section |= {"vocab_size": base + 256, "eos_token_id": base + 2}
        section |= {"bos_token_id": base, "pad_token_id": base + 255}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "drafter").mkdir()
    config = json.loads((ROOT / "golden/tiny/drafter/config.json").read_text())
    config |= {"vocab_size": base + 256}
    config["dflash_config"]["mask_token_id"] = base + 254
    (folder / "drafter" / "config.json").write_text(json.dumps(config))
    prompts: list[tuple[int, ...]] = []

    def item(prefix: tuple[int, ...], offset: int = 0) -> Any:
        begins = [len(prompt) for prompt in prompts if prefix[: len(prompt)] == prompt]
        if not begins:  # the engine measures its own speed
            return 0
        return answer[(len(prefix) - max(begins) + offset) % len(answer)]

    def target(prefix: tuple[int, ...]) -> Any:
        token = item(prefix)
        return token() if callable(token) else token

    def draft(prefix: tuple[int, ...]) -> list[int]:
        guesses = (item(prefix, offset) for offset in range(7))
        return [guess if isinstance(guess, int) else 0 for guess in guesses]

    def load(*_: object, max_context: int, **__: object) -> Engine:
        engine = scripted_engine(target, draft, vocab=base + 256, context=max_context)
        engine.tokenizer = Tokenizer.load(folder)
        engine.stop_ids = engine.tokenizer.stop_ids
        return engine

    def generate(engine: Engine, asked: list, *rest: object) -> Any:
        prompts[:] = map(tuple, asked)
        return decode(engine, asked, *rest)

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(Engine, "generate", generate)
    return folder
