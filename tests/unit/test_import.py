# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "20000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_waiting_threads_spin_shortly_unless_the_user_decides(given: dict[str, str], expected: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    code = "import sys, adaflash, os; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **given}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == [expected, "False"], "it must be set before PyTorch reads it"
