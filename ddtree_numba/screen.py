"""The command's two streams: the answer to standard output, all else to standard error."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Screen:
    """Writes and flushes; keeps their lines apart where both go to one terminal, pipe or file.

    `hold` then keeps the answer back until `finish`, since trees are drawn meanwhile.
    """

    def __init__(self, quiet: bool = False, hold: bool = False) -> None:
        self.out, self.err = sys.stdout, sys.stderr
        if hasattr(self.out, "reconfigure"):
            self.out.reconfigure(encoding="utf-8")  # whatever the locale: JSON and pipes expect it
        self.quiet = quiet
        shared = one_file(self.out, self.err)
        self._lines = shared or self.out.isatty()  # an answer's last line is ended, if need be
        self._held: list[str] | None = [] if hold and shared else None
        self._out_open = self._err_open = False  # the last line is not ended yet

    def answer(self, text: str) -> None:
        """A piece of the answer, at once and unchanged."""
        if self._held is not None:
            self._held.append(text)
        elif text:
            self._end_line_of_err()
            with naming("standard output"):
                self.out.write(text)
                self.out.flush()
            self._out_open = self._lines and not text.endswith("\n")

    def reasoning(self, text: str) -> None:
        """A piece of the reasoning, which is no part of the answer."""
        if text and not self.quiet:
            self.err.write(text)
            self.err.flush()
            self._err_open = not text.endswith("\n")

    def note(self, text: str) -> None:
        """A line, or lines, for the person at the terminal; not with --quiet."""
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """A line that even --quiet does not silence."""
        self._end_line_of_out()
        self._end_line_of_err()
        print(text.removesuffix("\n"), file=self.err, flush=True)

    def finish(self) -> None:
        """The answer is complete: show what was held, and end its line."""
        if self._held is not None:
            held, self._held = self._held, None
            self.answer("".join(held))
        self._end_line_of_out()

    def _end_line_of_out(self) -> None:
        if self._out_open:
            self.out.write("\n")
            self.out.flush()
            self._out_open = False

    def _end_line_of_err(self) -> None:
        if self._err_open:
            self.err.write("\n")
            self.err.flush()
            self._err_open = False


def open_closed_streams() -> None:
    """A standard stream that was closed by whoever started this leads nowhere, and is empty."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def one_file(a: TextIO, b: TextIO) -> bool:
    """Whether two streams lead to the same terminal, pipe or file."""
    try:
        return os.path.sameopenfile(a.fileno(), b.fileno())
    except (OSError, ValueError):  # a stream without a file, or a closed one
        return False


def discard_stdout() -> None:
    """After a broken pipe: let what is still buffered go nowhere, so that exiting stays silent."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """An error of the system names the file, which it does not by itself for a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def one_line(error: BaseException) -> str:
    """An error as one line; errors that do not explain themselves with their kind."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    explained: tuple[type[Any], ...] = (ValueError, OSError)
    if isinstance(error, explained) and text:
        return text
    if isinstance(error, MemoryError):
        return f"out of memory{': ' + text if text else ''}"
    return f"{type(error).__name__}{': ' + text if text else ''}"
