# SPDX-License-Identifier: Apache-2.0
"""The Ascend backend on CPU tensors: its operators are doubles, its device is not opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import adaflash_ascend.backend
from adaflash.ops.backend import Backend
from adaflash_ascend.backend import AscendBackend
from tests.unit.ascend.npu_doubles import registered


@pytest.fixture(scope="session")
def all_calls() -> Iterator[Counter[str]]:
    with registered() as calls:
        yield calls


@pytest.fixture
def calls(all_calls: Counter[str]) -> Counter[str]:
    """Calls of operators in this test."""
    all_calls.clear()
    return all_calls


@pytest.fixture
def backend(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> AscendBackend:
    """A backend whose attention takes fp32 too, and where any fallback is an error."""
    monkeypatch.setattr(adaflash_ascend.backend, "open_device", lambda device: None)
    made = AscendBackend("cpu", (torch.float16, torch.bfloat16, torch.float32))
    made.strict_ops = True
    return made


@pytest.fixture
def reference() -> Backend:
    return Backend()
