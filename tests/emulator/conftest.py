# SPDX-License-Identifier: Apache-2.0
"""Tests of tools/npu_emulator; they run in a process that it emulates a device for, and are skipped elsewhere."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

_FOLDER = Path(__file__).parent
_COMMAND = "python -m npu_emulator run -- python -m pytest tests/emulator"

EMULATED = find_spec("npu_emulator") is not None and os.environ.get("NPU_EMULATOR", "") not in ("", "0")


@pytest.fixture
def trace() -> ModuleType:
    """The module npu_emulator.trace, which can be imported in an emulated process only."""
    return import_module("npu_emulator.trace")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"npu: needs an emulated NPU: {_COMMAND}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker("npu")
            if not EMULATED:
                item.add_marker(pytest.mark.skip(reason=f"no emulated NPU: {_COMMAND}"))
