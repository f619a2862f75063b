"""Compiled kernels on disk, so that a second start compiles nothing.

A kernel's key is its bytecode and that of the device functions it calls, the constants and closures
that they use, the instructions, the options, the architecture and the versions of the compilers:
a touched or reformatted file stays valid, a changed constant does not. Files appear by renaming,
whole or not at all, so that any number of processes may start at once. A folder that cannot be
written costs one note and nothing else.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from ddtree_numba.kernels.compile import Compiled, CompileError, versions

FOLDER_VARIABLE = "DDTREE_NUMBA_CACHE_DIR"
OWN = "ddtree_numba.kernels."
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), np.generic)
_told: set[Path] = set()


def folder() -> Path:
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddtree_numba"


def key(function: Any, **options: Any) -> str:
    """Hexadecimal digest of all that shapes the kernel's machine code."""
    compilers = [Path(__file__).with_name(file).read_text() for file in ("asm.py", "compile.py")]
    everything = (describe(function), sorted(options.items()), versions(), sys.version, compilers)
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:32]


def describe(value: Any, seen: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> Any:
    """A nested tuple that is equal in every process for equal meaning."""
    value = getattr(value, "py_func", value)
    if id(value) in seen:
        return "recursion"
    seen += (id(value),)
    if isinstance(value, FunctionType):
        used = _used_names(value.__code__)
        globals_used = [
            (name, describe(value.__globals__[name], seen, used))
            for name in sorted(used)
            if name in value.__globals__
        ]
        cells = [describe(cell.cell_contents, seen, used) for cell in value.__closure__ or ()]
        return (_code(value.__code__), globals_used, cells)
    if isinstance(value, ModuleType):
        if not value.__name__.startswith(OWN):
            return value.__name__
        own = [name for name in sorted(names) if hasattr(value, name)]
        return (value.__name__, [(n, describe(getattr(value, n), seen, names)) for n in own])
    if hasattr(value, "declaration"):  # an instruction
        return value.declaration
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, tuple | list):
        return tuple(describe(each, seen, names) for each in value)
    if isinstance(value, type | BuiltinFunctionType):
        return value.__qualname__
    if type(value).__module__.startswith("numba"):
        return str(value) if hasattr(value, "key") else type(value).__name__
    raise CompileError(f"a kernel refers to {value!r}, which has no place in its cache key")


def _code(code: CodeType) -> tuple:
    constants = [_code(c) if isinstance(c, CodeType) else describe(c) for c in code.co_consts]
    return (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars)


def _used_names(code: CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return tuple({*code.co_names, *(name for c in inner for name in _used_names(c))})


def compiled(digest: str, name: str, make: Callable[[], Compiled]) -> Compiled:
    """The kernel of that key: from disk, or made and left there."""
    path = folder() / f"{name}-{digest}.cubin"
    found = _load(path)
    if found is None:
        found = make()
        _store(path, found)
    return found


def _load(path: Path) -> Compiled | None:
    """None for a file that is absent, cut short or damaged."""
    try:
        head, cubin = path.read_bytes().split(b"\n", 1)
        fields = json.loads(head)
        if fields.pop("digest") != hashlib.sha256(cubin).hexdigest():
            return None
        return Compiled(cubin=cubin, **fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _store(path: Path, kernel: Compiled) -> None:
    fields = asdict(kernel)
    cubin = fields.pop("cubin")
    head = json.dumps(fields | {"digest": hashlib.sha256(cubin).hexdigest()})
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(head.encode() + b"\n" + cubin)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if path.parent not in _told:
            _told.add(path.parent)
            logging.getLogger("ddtree_numba").warning(
                "compiled kernels are not kept: %s: %s (another folder: %s)",
                path.parent,
                error.strerror,
                FOLDER_VARIABLE,
            )
