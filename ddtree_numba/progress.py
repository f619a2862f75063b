"""How far a long step is: a bar on a terminal, else a line every few seconds."""

import time
from typing import Any, Self, TextIO

LINE_SECONDS = 5.0


class Progress:
    """Call it with (done, total). Quick steps print no line; a bar disappears with the end."""

    def __init__(self, label: str, unit: str, stream: TextIO, quiet: bool = False) -> None:
        self.label, self.unit, self.stream, self.quiet = label, unit, stream, quiet
        self.terminal = stream.isatty()
        self._bar: Any = None
        self._printed = self._begun = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self.quiet:
            return
        if self.terminal:
            self._draw(done, total)
        elif time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            print(f"{self.label}: {self._amount(done, total)}", file=self.stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm  # type: ignore[import-untyped]

            scale = self.unit == "B"
            self._bar = tqdm(
                desc=self.label,
                total=total,
                unit=self.unit,
                unit_scale=scale,
                file=self.stream,
                leave=False,
            )
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def _amount(self, done: int, total: int) -> str:
        percent = 100 * done // total if total else 100
        if self.unit == "B":
            rate = done / max(time.monotonic() - self._begun, 1e-3)
            left = f", {rate / 1e9:.2f} GB/s, {(total - done) / rate:.0f} s left" if done else ""
            return f"{percent} % of {total / 1e9:.1f} GB{left}"
        return f"{percent} %, {done} of {total} {self.unit}"
