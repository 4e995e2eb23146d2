# SPDX-License-Identifier: Apache-2.0
"""Files that are either there, whole, after a crash or not there at all."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def sync(path: Path) -> None:
    """Make a file's content, or a directory's list of names, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Make a directory and all it holds outlive a power cut."""
    for path in directory.iterdir():
        sync_tree(path) if path.is_dir() else sync(path)
    sync(directory)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that, whatever happens and however many write it, its old or one new content is there, whole.

    Raises:
        OSError: The disk is full or failed, or the folder cannot be written; the old content stands, unless only the
            last sync failed.
    """
    # A name of its own for every writer, on whatever machine; the mode is what `open` gives any new file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def hash_file(path: Path) -> str:
    """Return a file's sha256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
