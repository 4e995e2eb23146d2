# SPDX-License-Identifier: Apache-2.0
"""A replaced file is whole, whoever writes it meanwhile, and a write that fails leaves the old one and nothing else."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from adaflash.durable_files import replace_file

SIZE = 1 << 16


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _replace_often(path: Path, letter: int) -> int:
    """Replace the file 50 times and read it after each; returns how often it was whole."""
    num_whole = 0
    for _ in range(50):
        replace_file(path, bytes([letter]) * SIZE)
        content = path.read_bytes()
        num_whole += len(content) == SIZE and len(set(content)) == 1
    return num_whole


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    # Not forked: other tests of this process may have threads running.
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        whole = list(pool.map(_replace_often, [path] * 3, b"abc"))
    assert whole == [50, 50, 50]
    assert _names(tmp_path) == ["file"]


def test_a_file_gets_the_mode_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_full_disk_leaves_the_old_content_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("adaflash.durable_files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["file"]


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        replace_file(tmp_path / "file" / "below", b"")
