# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from adaflash.cli.main import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts=0 is invalid: must be in [1, 16]"),
        (["--max-tokens", "100000"], "--max-tokens=100000 is invalid"),
        (["--rounds", "0"], "--rounds=0 is invalid"),
        (["--domain", "cooking"], "holds no prompt of domain 'cooking'; it has: chat, code, maths, other"),
    ],
)
def test_usage_errors_exit_with_2_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["demo", *flags]) == 2
    assert message in capsys.readouterr().err
