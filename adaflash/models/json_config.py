# SPDX-License-Identifier: Apache-2.0
"""Typed access to a checkpoint's JSON files. Which keys mean what is the business of `models.config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from adaflash.errors import CheckpointError


class JsonConfig:
    """The keys of one JSON object; null counts as absent, and every error names file, key, value and what is allowed.

    Args:
        path: File the values come from, for messages.
        values: The object.
        section: Dotted key of the object inside the file, empty for the whole file.
    """

    def __init__(self, path: Path, values: Mapping[str, object], section: str = "") -> None:
        self.path = path
        self._values = {key: value for key, value in values.items() if value is not None}
        self._section = section

    @staticmethod
    def read(path: Path) -> JsonConfig:
        """Read a file holding one JSON object.

        Raises:
            CheckpointError: The file is missing, unreadable, or holds something else.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a JSON {type(values).__name__}: must be an object")
        return JsonConfig(path, values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> object:
        """Return the raw value, None if absent."""
        return self._values.get(key)

    def error(self, key: str, allowed: str) -> CheckpointError:
        """Return the error that says what `key` holds and what it must be."""
        name = f"{self._section}.{key}" if self._section else key
        found = f"{name}={self._values[key]!r} is invalid" if key in self else f"{name} is missing"
        return CheckpointError(f"{self.path}: {found}: must be {allowed}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an integer >= minimum; required when there is no default."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"an integer >= {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; required when there is no default."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(key, "a number > 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; required when there is no default."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers >= 0, where a lone integer is a list of one; empty if absent."""
        value = self._values.get(key, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            raise self.error(key, "an integer >= 0 or a list of them")
        return tuple(items)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent."""
        value = self._values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return tuple(value)

    def section(self, key: str) -> JsonConfig | None:
        """Return a nested object, None if absent or empty."""
        value = self._values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonConfig(self.path, value, f"{self._section}.{key}" if self._section else key)

    def sections(self) -> list[JsonConfig]:
        """Return every nested object that is not empty."""
        found = [self.section(key) for key, value in self._values.items() if isinstance(value, dict)]
        return [section for section in found if section is not None]
