# SPDX-License-Identifier: Apache-2.0
"""Where a server keeps the versions it fetched: half-done ones, whole ones, and what was decided about them."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from adaflash.durable_files import sync, sync_tree
from adaflash.errors import ConfigError, DamagedVersionError
from adaflash.training.manifest import Manifest
from adaflash.training.store_state import StoreState, load_state, save_state
from adaflash.training.version_directory import StoredVersion, directory_name, read_version, version_of

logger = logging.getLogger(__name__)

_INCOMING = ".incoming-"
_LOCK_FILE = "lock"


class StagedVersion(NamedTuple):
    """A version on this machine that passed every check: `directory` is a drafter checkpoint."""

    version: int
    directory: Path
    manifest: Manifest


class StagingArea:
    """A directory of fetched versions; survives a kill at any point. Thread-safe.

    Args:
        root: Created when missing; one process at a time may use it.
        keep: Newest whole versions kept, besides the pinned ones.

    Raises:
        ConfigError: Another process uses the directory, or it cannot be used.
    """

    def __init__(self, root: Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep} is invalid: must be >= 1")
        self.root, self._keep = root, keep
        self._lock = threading.RLock()
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._file_lock = FileLock(root / _LOCK_FILE, thread_local=False)
            self._file_lock.acquire(timeout=0)
            state, faults = load_state(root)
        except Timeout as error:
            raise ConfigError(f"staging directory {root} is in use by another process") from error
        except OSError as error:
            raise ConfigError(f"staging directory {root} cannot be used: {error}") from error
        self._state = state or StoreState()
        newest = max(self.versions(), default=0)
        if newest >= self._state.next_version:
            logger.error("what was decided about versions is lost root=%s faults=%s", root, faults)
            self._state.next_version = newest + 1

    def close(self) -> None:
        """Let another process use the directory."""
        self._file_lock.release()

    # ---- what was decided ------------------------------------------------------------------------------------

    @property
    def highest(self) -> int:
        """The highest version that was ever handed over; 0 for none."""
        return self._state.next_version - 1

    def note_handed_over(self, version: int) -> None:
        """Remember, for ever, that versions below this one are not wanted any more."""
        with self._lock:
            if version > self.highest:
                self._state.next_version = version + 1
                self._save()

    def is_bad(self, version: int) -> bool:
        """Say whether a version was marked bad here."""
        return version in self._state.bad

    def mark_bad(self, version: int, reason: str) -> bool:
        """Never fetch or hand over a version again; survives restarts. False when it was bad already."""
        with self._lock:
            if version in self._state.bad:
                return False
            self._state.bad[version] = reason
            self._save()
            return True

    def pin(self, name: str, version: int) -> None:
        """Keep a version whatever its age, until the pin is moved."""
        with self._lock:
            if self._state.pins.get(name) != version:
                self._state.pins[name] = version
                self._save()

    def pinned(self, name: str) -> int:
        """Return the version a pin is on; 0 for none."""
        return self._state.pins.get(name, 0)

    def _save(self) -> None:
        try:
            save_state(self.root, self._state)
        except OSError as error:
            logger.error("what was decided about versions cannot be saved root=%s reason=%s", self.root, error)

    # ---- versions --------------------------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Return the whole versions there are, bad ones too, oldest first."""
        return sorted(version for path in self.root.iterdir() if (version := version_of(path.name)) is not None)

    def find(self, version: int) -> StoredVersion | None:
        """Return a whole version, with its manifest read and its files not looked at; None when there is none."""
        directory = self.root / directory_name(version)
        try:
            return read_version(directory, version) if directory.is_dir() else None
        except DamagedVersionError as error:
            logger.warning("a staged version is damaged reason=%s", error)
            return None

    def incoming(self, version: int, manifest_sha256: str) -> Path:
        """Return the directory to fetch a version into; what an earlier attempt left in it is of the same content.

        Half-done versions of any other name are removed.

        Raises:
            OSError: The disk is full or failed.
        """
        directory = self.root / f"{_INCOMING}{directory_name(version)}-{manifest_sha256}"
        for path in self.root.glob(f"{_INCOMING}*"):
            if path != directory:
                shutil.rmtree(path)
        directory.mkdir(exist_ok=True)
        return directory

    def commit(self, incoming: Path, manifest: Manifest) -> StagedVersion:
        """Turn a fetched and checked directory into a whole version, and remove old ones.

        Raises:
            OSError: The disk is full or failed.
        """
        directory = self.root / directory_name(manifest.version)
        sync_tree(incoming)
        if directory.exists():
            shutil.rmtree(directory)
        incoming.rename(directory)
        sync(self.root)
        self._expire()
        return StagedVersion(manifest.version, directory, manifest)

    def discard(self, version: int) -> None:
        """Remove a whole version."""
        shutil.rmtree(self.root / directory_name(version), ignore_errors=True)

    def _expire(self) -> None:
        with self._lock:
            versions = self.versions()
            good = [version for version in versions if not self.is_bad(version)]
            kept = {*good[-self._keep :], versions[-1], *self._state.pins.values()}
        for version in versions:
            if version not in kept:
                self.discard(version)
