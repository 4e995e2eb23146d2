# SPDX-License-Identifier: Apache-2.0
"""Parses JSON that came from elsewhere: every key once, text that can be printed, numbers that are numbers."""

from __future__ import annotations

import json
from typing import NoReturn


def parse_json(data: bytes) -> object:
    """Return the value `data` holds, as UTF-8.

    Raises:
        ValueError: It is not JSON, nests too deeply, names a key twice, holds NaN or an infinity, or text that is not
            Unicode (half a surrogate pair).
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        for text in (key, value):
            if isinstance(text, str):
                text.encode("utf-8")
        if key in values:
            raise ValueError(f"the key {key!r} is there twice")
        values[key] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
