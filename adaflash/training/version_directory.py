# SPDX-License-Identifier: Apache-2.0
"""One version as a directory `v00000012`: its files, its manifest, and whether the two still agree."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from safetensors import SafetensorError, safe_open

from adaflash.durable_files import hash_file, replace_file
from adaflash.errors import DamagedVersionError, WeightError
from adaflash.training.manifest import (
    CONFIG_FILE,
    DELTA_FILE,
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    MODEL_FILE,
    FileInfo,
    Kind,
    Manifest,
    TensorInfo,
    layout_signature,
)

_NAME = re.compile(r"v(\d{8,19})")
_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class StoredVersion:
    """A version on disk whose manifest has been read."""

    directory: Path
    manifest: Manifest
    manifest_size: int
    manifest_sha256: str

    @property
    def version(self) -> int:
        """Its number."""
        return self.manifest.version


@dataclass(frozen=True)
class Publication:
    """What a publisher says about a version; the rest of the manifest follows from its files.

    Attributes:
        target_digest: The target it was trained for.
        train_step: Optimizer steps so far.
        metrics: Figures of the trainer, finite.
        kind: DELTA adds the difference from `base_version`, when that is smaller than the weights.
        base_version: The version training continued from.
        idempotency_key: A second publication with the same key is the first one; empty for none.
    """

    target_digest: str
    train_step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    kind: Kind = "FULL"
    base_version: int | None = None
    idempotency_key: str = ""


def directory_name(version: int) -> str:
    """Return the name of a version's directory."""
    return f"v{version:08d}"


def version_of(name: str) -> int | None:
    """Return the version a directory of this name holds, None when it is none."""
    match = _NAME.fullmatch(name)
    version = int(match[1]) if match else 0
    return version if version and directory_name(version) == name else None


def write_manifest(
    directory: Path, version: int, publication: Publication, base: StoredVersion | None
) -> StoredVersion:
    """Describe the files in `directory`, which has `model.safetensors` and `config.json`.

    Args:
        directory: Gets `manifest.json`.
        version: Its number.
        publication: What the files do not say.
        base: What `model.delta` is against; None when there is none.

    Raises:
        WeightError: A file is missing, or not what its name says.
    """
    names = [MODEL_FILE, CONFIG_FILE, *([] if base is None else [DELTA_FILE])]
    tensors = _read_tensors(directory / MODEL_FILE)
    try:
        files = tuple(FileInfo(name, (directory / name).stat().st_size, hash_file(directory / name)) for name in names)
    except OSError as error:
        raise WeightError(f"version {version} cannot be published: {error}") from error
    manifest = Manifest(
        version=version,
        base_version=publication.base_version,
        base_sha256=None if base is None else base.manifest.file(MODEL_FILE).sha256,
        kind="FULL" if base is None else "DELTA",
        target_digest=publication.target_digest,
        layout_signature=layout_signature(tensors),
        train_step=publication.train_step,
        files=files,
        tensors=tensors,
        metrics=publication.metrics,
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        idempotency_key=publication.idempotency_key,
    )
    try:
        data = manifest.to_json()
    except ValueError as error:
        raise WeightError(f"version {version} cannot be published: metrics={publication.metrics}: {error}") from error
    Manifest.from_json(data, f"the manifest of version {version}")
    replace_file(directory / MANIFEST_FILE, data)
    return StoredVersion(directory, manifest, len(data), hashlib.sha256(data).hexdigest())


def read_version(directory: Path, version: int) -> StoredVersion:
    """Read the manifest of a version; its files are not looked at.

    Raises:
        DamagedVersionError: The manifest is missing or not one of this version.
    """
    path = directory / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DamagedVersionError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
        data = path.read_bytes()
        manifest = Manifest.from_json(data, str(path))
    except OSError as error:
        raise DamagedVersionError(f"{path} cannot be read: {error}") from error
    except WeightError as error:
        raise DamagedVersionError(str(error)) from error
    if manifest.version != version:
        raise DamagedVersionError(f"{path}: version={manifest.version} is invalid: must be {version}")
    return StoredVersion(directory, manifest, len(data), hashlib.sha256(data).hexdigest())


def verify_files(directory: Path, files: Iterable[FileInfo]) -> None:
    """Compare size and sha256 of every file with what it was; reads them all, about a second per GB.

    Raises:
        DamagedVersionError: A file is missing, no plain file, or differs; names it.
    """
    for info in files:
        path = directory / info.name
        try:
            if path.is_symlink() or not path.is_file():
                raise DamagedVersionError(f"{path} is missing, or no plain file")
            size = path.stat().st_size
            if size != info.size:
                raise DamagedVersionError(f"{path} has {size} bytes: must have {info.size}")
            sha256 = hash_file(path)
        except OSError as error:
            raise DamagedVersionError(f"{path} cannot be read: {error}") from error
        if sha256 != info.sha256:
            raise DamagedVersionError(f"{path} has sha256 {sha256}: must have {info.sha256}")


def _read_tensors(path: Path) -> tuple[TensorInfo, ...]:
    try:
        with safe_open(path, framework="numpy") as file:
            slices = [(name, file.get_slice(name)) for name in sorted(file.keys())]
            shapes = [(name, str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices]
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{path.name} cannot be published: it is no safetensors file: {error}") from error
    return tuple(TensorInfo(name, dtype, shape, _num_bytes(name, dtype, shape)) for name, dtype, shape in shapes)


def _num_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in _DTYPE_BYTES:
        raise WeightError(f"tensor {name} has dtype {dtype}: must be one of {', '.join(_DTYPE_BYTES)}")
    num_bytes = _DTYPE_BYTES[dtype]
    for size in shape:
        num_bytes *= size
    return num_bytes
