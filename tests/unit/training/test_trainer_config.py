# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from adaflash.errors import ConfigError
from adaflash.training.trainer_config import TrainerConfig


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("lr", 0.0, "> 0 and finite"),
        ("lr", math.inf, "> 0 and finite"),
        ("spool_bytes", 1000, ">= 8388608"),
        ("lr", math.nan, "a number"),
        ("lr", "1e-3", "a number"),
        ("alpha", 1.1, r"in \[0, 1\]"),
        ("replay_share", -0.1, r"in \[0, 1\]"),
        ("beta2", 1.0, r"in \[0, 1\)"),
        ("weight_decay", -1.0, ">= 0"),
        ("seed", -1, r"in \[0, 2\^63\)"),
        ("trajectories_per_step", 0, ">= 1"),
        ("trajectories_per_step", 1.0, "int"),
        ("num_threads", 0, ">= 1"),
        ("max_trajectory_tokens", 2, ">= 3"),
        ("loss", "kl", "one of ce, reverse_kl, forward_kl"),
        ("clip", None, "one of term, position, none"),
        ("publish_kind", "delta", "one of FULL, DELTA"),
        ("freeze_context", 1, "bool"),
        ("store", 3, "str or NoneType"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}=.* is invalid: must be {allowed}"):
        TrainerConfig(**{field: value})


def test_an_unknown_setting_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'max_epoch' \(did you mean 'max_epochs'\?\)"):
        TrainerConfig.from_mapping({"max_epoch": 1.0})
    assert TrainerConfig.from_mapping({"max_epochs": 1}).max_epochs == 1


def test_directories_lie_in_the_cache_folder_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE_DIR", "/cache")
    assert str(TrainerConfig().directory("spool")) == "/cache/trainer/spool"
    assert str(TrainerConfig(spool="/elsewhere").directory("spool")) == "/elsewhere"


def test_the_settings_import_no_torch() -> None:
    code = "import sys, adaflash.training.trainer_config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
