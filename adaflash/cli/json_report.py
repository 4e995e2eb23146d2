# SPDX-License-Identifier: Apache-2.0
"""Writes what `--json` asks for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from adaflash.errors import ConfigError


def write_json(report: Mapping[str, object], destination: str) -> None:
    """Write a report to a file, or to stdout for `-`.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = json.dumps(report, indent=2) + "\n"
    if destination == "-":
        sys.stdout.write(text)
        return
    try:
        Path(destination).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json={destination!r} cannot be written: {error}") from error
