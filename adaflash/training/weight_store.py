# SPDX-License-Identifier: Apache-2.0
"""Immutable, numbered versions of the drafter's weights in a directory, written by one process."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from adaflash.durable_files import sync, sync_tree
from adaflash.errors import BadVersionError, ConfigError, DamagedVersionError, UnknownVersionError, WeightError
from adaflash.training.delta import write_delta
from adaflash.training.manifest import DELTA_FILE, MANIFEST_FILE, MODEL_FILE, Manifest
from adaflash.training.store_state import StoreState, load_state, save_state
from adaflash.training.version_directory import (
    Publication,
    StoredVersion,
    directory_name,
    read_version,
    verify_files,
    version_of,
    write_manifest,
)

logger = logging.getLogger(__name__)

Writer = Callable[[Path], None]
Check = Callable[[Path, Manifest], None]
Listener = Callable[[], None]

_LOCK_FILE = "lock"
# Nothing with these prefixes is a version; what a crash left of them is removed at the next start.
_STAGING, _REMOVED = ".staging-", ".removed-"
_MAX_LEAP = 1 << 32


class WeightStore:
    """Publishes, keeps, verifies and retires versions. Thread-safe; every method may do disk I/O.

    A version is written under a temporary name, synced, and renamed: it is there whole, or not there. Its number is
    reserved on disk before that, so that none is ever used twice, whatever crashes or is deleted. Opening hashes every
    file (about a second per GB); a version that differs from its manifest is named in `damaged` and not handed out.

    Args:
        root: Directory of the store; created when missing.
        keep: Newest good versions that retention keeps, besides the newest and the pinned ones.
        check: Called with directory and manifest of a version before it becomes visible; raises to refuse it.

    Attributes:
        damaged: What is wrong, by the name of the file or directory in `root`.

    Raises:
        ConfigError: Another process writes to the store, or the directory cannot be used.
    """

    def __init__(self, root: Path, *, keep: int = 4, check: Check | None = None) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep} is invalid: must be >= 1")
        self.root, self._keep, self._check = root, keep, check
        self._lock = threading.RLock()
        self._publishing = threading.Lock()
        self._listeners: list[Listener] = []
        self._versions: dict[int, StoredVersion] = {}
        self.damaged: dict[str, str] = {}
        self._file_lock = self._acquire()
        try:
            self._remove_leftovers()
            numbers = self._scan()
            self._state = self._load_state(numbers)
            save_state(self.root, self._state)
        except OSError as error:
            self._file_lock.release()
            raise ConfigError(f"weight store {root} cannot be used: {error}") from error
        for name, fault in self.damaged.items():
            logger.error("the weight store is damaged, the rest is served root=%s name=%s fault=%s", root, name, fault)

    def close(self) -> None:
        """Let another process write; the versions stay."""
        self._file_lock.release()

    # ---- reading ---------------------------------------------------------------------------------------------

    def versions(self) -> list[StoredVersion]:
        """Return the whole versions there are, bad ones too, oldest first."""
        with self._lock:
            return [self._versions[version] for version in sorted(self._versions)]

    def newest(self, from_version: int = 0) -> StoredVersion | None:
        """Return the newest good version if it is `from_version` or newer, else None."""
        with self._lock:
            good = [version for version in self._versions if version not in self._state.bad]
            return self._versions[max(good)] if good and max(good) >= from_version else None

    def get(self, version: int) -> StoredVersion:
        """Return a version.

        Raises:
            UnknownVersionError: It was never published, or removed since.
            DamagedVersionError: Its files differ from its manifest.
            BadVersionError: It was marked bad.
        """
        with self._lock:
            fault = self.damaged.get(directory_name(version))
            if fault is not None:
                raise DamagedVersionError(f"version {version} is damaged: {fault}")
            if version in self._state.bad:
                raise BadVersionError(f"version {version} was marked bad: {self._state.bad[version]}")
            if version not in self._versions:
                raise UnknownVersionError(f"version {version} is not in the store: must be one of {self._shown()}")
            return self._versions[version]

    def open_file(self, version: int, name: str) -> BinaryIO:
        """Open a file of a version; it stays readable when the version is removed meanwhile.

        Raises:
            UnknownVersionError: There is no such version, or no such file in it; and as `get`.
        """
        stored = self.get(version)
        names = [MANIFEST_FILE, *(file.name for file in stored.manifest.files)]
        if name not in names:
            raise UnknownVersionError(f"version {version} has no file {name!r}: must be one of {', '.join(names)}")
        try:
            return (stored.directory / name).open("rb")
        except FileNotFoundError as error:
            raise UnknownVersionError(f"version {version} is not in the store any more") from error

    def find(self, idempotency_key: str) -> int | None:
        """Return the version published with a key, also one removed since; None for none, or if it is damaged."""
        with self._lock:
            version = self._state.keys.get(idempotency_key) if idempotency_key else None
            return None if version is None or directory_name(version) in self.damaged else version

    def verify(self, version: int) -> None:
        """Hash a version's files again; one that differs is in `damaged` from now on. Raises as `get`."""
        stored = self.get(version)
        try:
            verify_files(stored.directory, stored.manifest.files)
        except DamagedVersionError as error:
            with self._lock:
                self.damaged[stored.directory.name] = str(error)
                self._versions.pop(version, None)
            raise

    @property
    def next_version(self) -> int:
        """Number the next version gets at least."""
        return self._state.next_version

    @property
    def bad(self) -> Mapping[int, str]:
        """Versions marked bad, with the reason."""
        with self._lock:
            return dict(self._state.bad)

    @property
    def pins(self) -> Mapping[str, int]:
        """Pinned versions by the pin's name."""
        with self._lock:
            return dict(self._state.pins)

    # ---- writing ---------------------------------------------------------------------------------------------

    def publish(self, write: Writer, publication: Publication) -> int:
        """Add a version and return its number; tells the listeners.

        Args:
            write: Writes `model.safetensors` and `config.json` into the directory it is given.
            publication: What else belongs into the manifest.

        Raises:
            WeightError: The base of a DELTA is not there, the files are not what they must be, or the disk failed;
                nothing is published, and the number is not used again.
        """
        with self._publishing:
            known = self.find(publication.idempotency_key)
            if known is not None:
                return known
            base = self._base_of(publication)
            try:
                stored = self._write(write, publication, base)
            except OSError as error:
                raise WeightError(f"nothing was published to {self.root}: {error}") from error
            self._admit(stored)
        self._tell()
        return stored.version

    def mark_bad(self, version: int, reason: str) -> None:
        """Never hand a version out again; survives restarts, and the first reason stays.

        Raises:
            UnknownVersionError: No such version was ever published.
        """
        with self._lock:
            if not 0 < version < self._state.next_version:
                raise UnknownVersionError(f"version {version} was never published: the newest is {self._shown()}")
            if version in self._state.bad:
                return
            self._state.bad[version] = reason
            self._save()
        logger.warning("version marked bad version=%d reason=%s", version, reason)
        self._tell()

    def pin(self, name: str, version: int) -> None:
        """Keep a version whatever its age, until the pin is moved. Raises as `get`."""
        with self._lock:
            self.get(version)
            if self._state.pins.get(name) != version:
                self._state.pins[name] = version
                self._save()

    def unpin(self, name: str) -> None:
        """Forget a pin, if there is one; retention decides at the next publication."""
        with self._lock:
            if self._state.pins.pop(name, None) is not None:
                self._save()

    def skip_to(self, version: int) -> None:
        """Never give a number below `version`: somebody has seen higher ones than this store remembers.

        A leap of more than 2^32 is ignored; no publisher gets there.
        """
        with self._lock:
            if self._state.next_version < version <= self._state.next_version + _MAX_LEAP:
                logger.warning("version numbers are skipped from=%d to=%d", self._state.next_version, version)
                self._state.next_version = version
                self._save()

    def add_listener(self, listener: Listener) -> None:
        """Have `listener` called, from the thread that made it so, when a version was added or marked bad."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop calling `listener`."""
        with self._lock:
            self._listeners.remove(listener)

    # ---- publishing ------------------------------------------------------------------------------------------

    def _base_of(self, publication: Publication) -> StoredVersion | None:
        if publication.kind == "FULL":
            return None
        if publication.base_version is None:
            raise WeightError("base_version=None is invalid with kind=DELTA: must be a version in the store")
        try:
            return self.get(publication.base_version)
        except WeightError as error:
            raise WeightError(f"{error}; publish the new version with kind=FULL") from error

    def _write(self, write: Writer, publication: Publication, base: StoredVersion | None) -> StoredVersion:
        with self._lock:
            version = self._state.next_version
            self._state.next_version += 1
            save_state(self.root, self._state)
        staging = self.root / (_STAGING + directory_name(version))
        try:
            staging.mkdir()
            write(staging)
            if base is not None and not self._has_delta(base, staging):
                base = None
            stored = write_manifest(staging, version, publication, base)
            if self._check is not None:
                self._check(staging, stored.manifest)
            sync_tree(staging)
            final = staging.rename(self.root / directory_name(version))
            sync(self.root)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return StoredVersion(final, stored.manifest, stored.manifest_size, stored.manifest_sha256)

    @staticmethod
    def _has_delta(base: StoredVersion, directory: Path) -> bool:
        return write_delta(base.directory / MODEL_FILE, directory / MODEL_FILE, directory / DELTA_FILE)

    def _admit(self, stored: StoredVersion) -> None:
        with self._lock:
            self._versions[stored.version] = stored
            if stored.manifest.idempotency_key:
                self._state.remember_key(stored.manifest.idempotency_key, stored.version)
                self._save()
            expired = self._expired()
            for version in expired:
                del self._versions[version]
        logger.info("version published version=%d train_step=%d", stored.version, stored.manifest.train_step)
        for version in expired:
            self._remove(self.root / directory_name(version))

    def _expired(self) -> list[int]:
        good = sorted(version for version in self._versions if version not in self._state.bad)
        kept = {*good[-self._keep :], max(self._versions), *self._state.pins.values()}
        return [version for version in self._versions if version not in kept]

    def _remove(self, directory: Path) -> None:
        removed = self.root / (_REMOVED + directory.name)
        try:
            directory.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            logger.warning("an old version cannot be removed path=%s reason=%s", directory, error)

    def _save(self) -> None:
        """Save what was changed; on a bad disk the change holds until a restart."""
        try:
            save_state(self.root, self._state)
        except OSError as error:
            logger.error("the weight store's state cannot be saved root=%s reason=%s", self.root, error)

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _shown(self) -> str:
        return ", ".join(str(version) for version in sorted(self._versions)) or "none yet"

    # ---- opening ---------------------------------------------------------------------------------------------

    def _acquire(self) -> FileLock:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.root / _LOCK_FILE, thread_local=False)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(f"weight store {self.root} is in use: another process writes to it") from error
        except OSError as error:
            raise ConfigError(f"weight store {self.root} cannot be used: {error}") from error
        return lock

    def _remove_leftovers(self) -> None:
        for path in self.root.iterdir():
            if path.name.startswith((_STAGING, _REMOVED)):
                shutil.rmtree(path)

    def _scan(self) -> list[int]:
        """Read and hash every version; return the numbers seen, damaged ones too."""
        numbers = []
        for path in sorted(self.root.iterdir()):
            version = version_of(path.name)
            if version is None:
                continue
            numbers.append(version)
            try:
                stored = read_version(path, version)
                verify_files(path, stored.manifest.files)
                self._versions[version] = stored
            except DamagedVersionError as error:
                self.damaged[path.name] = str(error)
        return numbers

    def _load_state(self, numbers: list[int]) -> StoreState:
        state, faults = load_state(self.root)
        state = state or StoreState()
        # A crash while the first state is written leaves one copy, or none: nothing is lost.
        if numbers or state.serial > 1 or any((self.root / name).exists() for name in faults):
            self.damaged.update(faults)
        state.next_version = max([state.next_version, *(number + 1 for number in numbers)])
        for stored in self.versions():
            key = stored.manifest.idempotency_key
            if key and key not in state.keys:
                state.remember_key(key, stored.version)
        return state
