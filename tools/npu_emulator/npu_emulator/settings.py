# SPDX-License-Identifier: Apache-2.0
"""The environment variables that configure an emulated process, and what they may hold."""

from __future__ import annotations

import os
from typing import NamedTuple

ENABLED = "NPU_EMULATOR"
DEVICES = "NPU_EMULATOR_DEVICES"
SOC = "NPU_EMULATOR_SOC"
LIFT = "NPU_EMULATOR_LIFT"
TRACE = "NPU_EMULATOR_TRACE"
MEMORY = "NPU_EMULATOR_MEMORY"
TIMEOUT = "NPU_EMULATOR_TIMEOUT_MS"
CACHE = "NPU_EMULATOR_CACHE"

LIFTS = ("dtype",)
MAX_DEVICES = 16  # arrays in csrc


class SettingError(ValueError):
    """A setting is wrong; says which, its value and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name}={value!r} is invalid: must be {allowed}")


class Settings(NamedTuple):
    """What the Python side reads; the C side reads devices, SoC, memory and timeout by itself.

    Attributes:
        lifts: Names of limits that are not checked, of `LIFTS`.
        trace: File to write the process's totals to at exit, or None.
    """

    lifts: frozenset[str]
    trace: str | None


def enabled() -> bool:
    """Whether this process is to be emulated."""
    return os.environ.get(ENABLED, "") not in ("", "0")


def whole(name: str, value: str, low: int, high: int) -> int:
    """`value` as an integer of [low, high]."""
    if not value.isdecimal() or not low <= int(value) <= high:
        raise SettingError(name, value, f"an integer in [{low}, {high}]")
    return int(value)


def lifts(value: str) -> frozenset[str]:
    """The limits of a comma-separated list."""
    names = frozenset(name for name in value.split(",") if name)
    if unknown := names - set(LIFTS):
        raise SettingError(LIFT, ",".join(sorted(unknown)), f"of {', '.join(LIFTS)}")
    return names


def from_environment() -> Settings:
    """Read and check every variable.

    Raises:
        SettingError: One of them is wrong.
    """
    for name, low, high in ((DEVICES, 0, MAX_DEVICES), (MEMORY, 1 << 20, 1 << 50), (TIMEOUT, 1, 10**9)):
        if value := os.environ.get(name):
            whole(name, value, low, high)
    return Settings(lifts(os.environ.get(LIFT, "")), os.environ.get(TRACE) or None)
