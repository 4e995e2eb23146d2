# SPDX-License-Identifier: Apache-2.0
"""Refuses versions that could not take the place of the drafter being served, before anything else sees them.

A manifest is checked before any file is fetched, the files before any is loaded: sizes, sha256, the safetensors header,
every tensor's name, dtype and shape, every value. Reads in chunks; no tensor is ever held whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from adaflash.errors import AdaFlashError, PayloadError
from adaflash.models.safetensors_file import TensorEntry, read_header
from adaflash.models.strict_json import parse_json
from adaflash.speculative.drafter_config import parse_drafter_config
from adaflash.speculative.drafter_loader import LENGTH_HEAD_PREFIX, OWN_TENSORS
from adaflash.training.drafter_layout import DrafterLayout, hash_tensor, raw_chunks, tensor_info
from adaflash.training.manifest import CONFIG_FILE, MODEL_FILE, Manifest, TensorInfo
from adaflash.training.version_directory import verify_files

_MAX_MESSAGE_CHARS = 600
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class PayloadLimits:
    """What is refused by size alone, before it is read.

    Attributes:
        max_bytes: Of all files of a version.
        max_tensors: Of a version.
        max_header_bytes: Of the safetensors header.
    """

    max_bytes: int = 16 << 30
    max_tensors: int = 4096
    max_header_bytes: int = 1 << 20


class PayloadChecker:
    """Checks versions against one drafter; every refusal is a PayloadError that names what is wrong and allowed.

    Args:
        layout: Of the drafter being served.
        target_digest: Of the target being served.
        limits: Sizes beyond which nothing is read.
    """

    def __init__(self, layout: DrafterLayout, target_digest: str, limits: PayloadLimits | None = None) -> None:
        self.layout, self.target_digest = layout, target_digest
        self.limits = limits or PayloadLimits()

    def check_offer(self, target_digest: str, signature: str, num_bytes: int) -> None:
        """Check what is known of a version before its manifest; raises PayloadError."""
        if target_digest != self.target_digest:
            raise _refused(
                f"target_digest={target_digest} is another target's: must be {self.target_digest}, of the one served"
            )
        if num_bytes > self.limits.max_bytes:
            raise _refused(f"it has {num_bytes} bytes: must have at most {self.limits.max_bytes}")
        if signature != self.layout.signature:
            raise _refused(
                f"layout_signature={signature} is another drafter's: must be {self.layout.signature}, "
                "of the names, dtypes and shapes being served"
            )

    def check_manifest(self, manifest: Manifest) -> None:
        """Check what a version says it holds; raises PayloadError naming the first tensor that does not fit."""
        self._check_tensors({tensor.name: tensor for tensor in manifest.tensors})
        self.check_offer(manifest.target_digest, manifest.layout_signature, manifest.num_bytes)
        config_bytes = manifest.file(CONFIG_FILE).size
        if config_bytes > _MAX_CONFIG_BYTES:
            raise _refused(f"{CONFIG_FILE} has {config_bytes} bytes: must have at most {_MAX_CONFIG_BYTES}")

    def check(self, directory: Path, manifest: Manifest) -> None:
        """Check a version's files in full; reads them three times, about three seconds per GB.

        Args:
            directory: Holds `model.safetensors` and `config.json`; what DELTA adds is not looked at.
            manifest: What it must be.

        Raises:
            PayloadError: Names the file or tensor, what it is, and what is allowed.
        """
        try:
            self.check_manifest(manifest)
            verify_files(directory, [manifest.file(MODEL_FILE), manifest.file(CONFIG_FILE)])
            self._check_config(directory / CONFIG_FILE)
            entries = self._read_header(directory / MODEL_FILE)
            self._check_tensors({name: tensor_info(name, entry) for name, entry in entries.items()})
            self._check_constants(entries)
            _check_finite(entries)
        except PayloadError:
            raise
        except (AdaFlashError, OSError) as error:
            raise _refused(str(error)) from error

    def _check_tensors(self, found: Mapping[str, TensorInfo]) -> None:
        if len(found) > self.limits.max_tensors:
            raise _refused(f"it has {len(found)} tensors: must have at most {self.limits.max_tensors}")
        expected = self.layout.tensors
        for name in sorted(found.keys() - expected.keys()):
            raise _refused(_unexpected(name, len(expected)))
        for name in sorted(expected.keys() - found.keys()):
            raise _refused(f"tensor {name} is missing: must be {_described(expected[name])}")
        for name, tensor in found.items():
            if tensor != expected[name]:
                raise _refused(
                    f"tensor {name} is {_described(tensor)}: must be {_described(expected[name])}, as being served"
                )

    def _read_header(self, path: Path) -> dict[str, TensorEntry]:
        with path.open("rb") as stream:
            num_bytes = int.from_bytes(stream.read(8), "little")
        if num_bytes > self.limits.max_header_bytes:
            raise _refused(f"{path.name} has a header of {num_bytes} bytes: at most {self.limits.max_header_bytes}")
        return read_header(path)

    def _check_config(self, path: Path) -> None:
        try:
            raw = parse_json(path.read_bytes())
            if not isinstance(raw, dict):
                raise ValueError("must be an object")
            config = parse_drafter_config(raw, path)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise _refused(f"{path.name} is no drafter's: {error}") from error
        for field in dataclasses.fields(config):
            value, expected = getattr(config, field.name), getattr(self.layout.config, field.name)
            if value != expected:
                raise _refused(f"{path.name}: {field.name}={value} is invalid: must be {expected}, as being served")

    def _check_constants(self, entries: Mapping[str, TensorEntry]) -> None:
        for name, sha256 in self.layout.constants.items():
            if hash_tensor(entries[name]) != sha256:
                raise _refused(f"tensor {name} is not learned: must be byte for byte the one being served")


def _unexpected(name: str, num_expected: int) -> str:
    short = name.removeprefix("model.")
    if short in OWN_TENSORS:
        return f"tensor {name} is the target's {OWN_TENSORS[short]}: versions hold the drafter's own tensors only"
    if name.startswith(LENGTH_HEAD_PREFIX):
        return (
            f"tensor {_shown(name)} is of a length head: must not be there, as the drafter served has another or none"
        )
    return f"tensor {_shown(name)} is unexpected: must be one of the {num_expected} of the drafter being served"


def _described(tensor: TensorInfo) -> str:
    return f"{_shown(list(tensor.shape))} {_shown(tensor.dtype)}"


def _check_finite(entries: Mapping[str, TensorEntry]) -> None:
    for name, entry in entries.items():
        if not entry.dtype.is_floating_point:
            continue
        first = 0
        for chunk in raw_chunks(entry):
            finite = torch.frombuffer(chunk, dtype=entry.dtype).isfinite()
            if not finite.all():
                index = first + int(finite.logical_not().nonzero()[0])
                raise _refused(f"tensor {name} is not finite at element {index}: must be finite everywhere")
            first += len(finite)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) and value.isprintable() and value.isascii() else ascii(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _refused(message: str) -> PayloadError:
    return PayloadError(message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "...")
