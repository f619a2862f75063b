"""Typed access to a checkpoint's JSON files; every complaint is one line naming file and key."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; one line naming the file, tensor, option or value."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # broken JSON or UTF-8, or nested too deep
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Fields(Mapping[str, Any]):
    """One object of a JSON file, with typed access. A key that holds null counts as absent."""

    def __init__(self, values: dict[str, Any], path: Path, where: str = ""):
        self._values = {key: value for key, value in values.items() if value is not None}
        self.path = path
        self.where = where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        return cls(read_json(path), path)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def error(self, key: str, complaint: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.where}{key} {complaint}")

    def section(self, key: str) -> "Fields | None":
        """The object under `key`, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r}")
        return Fields(value, self.path, f"{self.where}{key}.")

    def require(self, key: str) -> Any:
        if key not in self:
            raise self.error(key, "is missing")
        return self[key]

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"must be an integer of at least {least}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
            raise self.error(key, f"must be a number of at least 0, not {value!r}")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers, or one integer, or nothing."""
        value = self.get(key, [])
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise self.error(key, f"must be an integer or a list of integers, not {value!r}")
        return tuple(items)

    def expect(self, key: str, *allowed: Any) -> None:
        """Absent, or one of the values that the forward pass here was written for."""
        value = self.get(key, allowed[0])
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            wanted = " or ".join(repr(item) for item in allowed)
            raise self.error(key, f"is {value!r}; only {wanted} is supported")
