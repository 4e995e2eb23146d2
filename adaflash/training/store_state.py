# SPDX-License-Identifier: Apache-2.0
"""What a weight store remembers beyond its versions: the next number, bad marks, pins and idempotency keys."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from adaflash.durable_files import replace_file
from adaflash.models.strict_json import parse_json

# Two copies, written one after the other: at any instant, whatever happens to one, the other is whole.
STATE_FILES = ("state.json", "state.copy.json")
MAX_KEYS = 4096


@dataclass
class StoreState:
    """The mutable part of a store.

    Attributes:
        next_version: Number the next version gets; it only grows.
        bad: Versions marked bad, with the reason.
        pins: Versions that retention keeps, by the pin's name.
        keys: Version of each idempotency key, oldest first; also of versions removed since.
        serial: Counts the writes, so that the newer of two copies is known.
    """

    next_version: int = 1
    bad: dict[int, str] = field(default_factory=dict)
    pins: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    serial: int = 0

    def remember_key(self, key: str, version: int) -> None:
        """Note which version an idempotency key stands for; the oldest of more than MAX_KEYS is forgotten."""
        self.keys[key] = version
        while len(self.keys) > MAX_KEYS:
            del self.keys[next(iter(self.keys))]


def save_state(root: Path, state: StoreState) -> None:
    """Write both copies; the state outlives a crash at any point, as it was or as it is.

    Raises:
        OSError: The disk is full or failed; at least one copy is whole.
    """
    state.serial += 1
    values = {
        "next_version": state.next_version,
        "bad": {str(version): reason for version, reason in state.bad.items()},
        "pins": state.pins,
        "keys": state.keys,
        "serial": state.serial,
    }
    body = json.dumps(values)
    data = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "state": body}).encode()
    for name in STATE_FILES:
        replace_file(root / name, data)


def load_state(root: Path) -> tuple[StoreState | None, dict[str, str]]:
    """Return the newer whole copy, None without one, and what is wrong by the name of the file."""
    found: list[StoreState] = []
    faults: dict[str, str] = {}
    for name in STATE_FILES:
        try:
            found.append(_parse((root / name).read_bytes()))
        except FileNotFoundError:
            faults[name] = "is missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            faults[name] = f"is damaged: {error}"
    return max(found, key=lambda state: state.serial, default=None), faults


def _parse(data: bytes) -> StoreState:
    envelope = parse_json(data)
    if not isinstance(envelope, dict) or not isinstance(envelope.get("state"), str):
        raise ValueError("it has no state")
    body = envelope["state"].encode()
    if hashlib.sha256(body).hexdigest() != envelope.get("sha256"):
        raise ValueError("its sha256 is another")
    values = parse_json(body)
    assert isinstance(values, dict), "what has the right sha256 was written by save_state"
    bad = {int(version): reason for version, reason in values["bad"].items()}
    return StoreState(values["next_version"], bad, values["pins"], values["keys"], values["serial"])
