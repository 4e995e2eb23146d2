# SPDX-License-Identifier: Apache-2.0
"""The manifest of a version of the drafter's weights: what its files hold and what they were made from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from adaflash.errors import WeightError
from adaflash.models.strict_json import parse_json

Kind = Literal["FULL", "DELTA"]

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
DELTA_FILE = "model.delta"
MANIFEST_FILE = "manifest.json"
FILES_OF_KIND: Mapping[Kind, frozenset[str]] = {
    "FULL": frozenset({MODEL_FILE, CONFIG_FILE}),
    "DELTA": frozenset({MODEL_FILE, CONFIG_FILE, DELTA_FILE}),
}

FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20
MAX_VERSION = 2**63 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class TensorInfo(NamedTuple):
    """One tensor as the header of its file describes it; `dtype` as safetensors spells it, e.g. `BF16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class FileInfo(NamedTuple):
    """One file: its name in the version's directory, its size in bytes, its sha256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a version is; immutable, and written beside its files as `manifest.json`.

    Attributes:
        version: Its number, > 0.
        base_version: The version training continued from; for DELTA also what `model.delta` is against.
        base_sha256: sha256 of the base's `model.safetensors`; only with DELTA.
        kind: DELTA when there is a `model.delta` besides the whole `model.safetensors`.
        target_digest: The target it was trained for.
        layout_signature: Hash of all tensors' names, dtypes and shapes; see `layout_signature`.
        train_step: Optimizer steps so far.
        files: Everything in the directory but the manifest.
        tensors: The tensors of `model.safetensors`, by name.
        metrics: Figures of the trainer, finite.
        created_at: UTC in ISO 8601; for people, nothing is ordered by it.
        idempotency_key: The publisher's name for this version; empty for none.
    """

    version: int
    base_version: int | None
    base_sha256: str | None
    kind: Kind
    target_digest: str
    layout_signature: str
    train_step: int
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...]
    metrics: Mapping[str, float]
    created_at: str
    idempotency_key: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size for file in self.files)

    def file(self, name: str) -> FileInfo:
        """Return the entry of a file that is known to be there."""
        return next(file for file in self.files if file.name == name)

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        values = dataclasses.asdict(self) | {
            "format": FORMAT,
            "files": [file._asdict() for file in self.files],
            "tensors": [tensor._asdict() for tensor in self.tensors],
            "metrics": dict(self.metrics),
        }
        return json.dumps(values, indent=1, allow_nan=False).encode()

    @staticmethod
    def from_json(data: bytes, source: str) -> Manifest:
        """Return the manifest in `data`.

        Args:
            data: Content of `manifest.json`.
            source: What it is, for messages.

        Raises:
            WeightError: It is not a manifest; names the field and what it must be.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise WeightError(f"{source} has {len(data)} bytes: must be at most {MAX_MANIFEST_BYTES}")
        try:
            values = parse_json(data)
        except ValueError as error:
            raise WeightError(f"{source} cannot be read as JSON: {error}") from error
        return _parse(values, source)


def layout_signature(tensors: Iterable[TensorInfo]) -> str:
    """Return a hash of names, dtypes and shapes in any order: equal for drafters whose weights are exchangeable."""
    lines = sorted(json.dumps([tensor.name, tensor.dtype, tensor.shape]) for tensor in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_sha256(value: object) -> bool:
    """Say whether a value is a sha256 in hexadecimal."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_VERSION


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 4096


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 16 and all(_is_count(size) for size in value)


# Field -> (test, what passes it).
_FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "format": (lambda value: type(value) is int and value == FORMAT, f"{FORMAT}"),
    "version": (lambda value: _is_count(value) and value != 0, "an integer > 0"),
    "base_version": (lambda value: value is None or _is_count(value), "null or an integer >= 0"),
    "base_sha256": (lambda value: value is None or is_sha256(value), "null or a sha256"),
    "kind": (lambda value: value in get_args(Kind), "FULL or DELTA"),
    "target_digest": (_is_text, "a string"),
    "layout_signature": (is_sha256, "a sha256"),
    "train_step": (_is_count, "an integer >= 0"),
    "files": (lambda value: isinstance(value, list), "a list"),
    "tensors": (lambda value: isinstance(value, list), "a list"),
    "metrics": (
        lambda value: isinstance(value, dict) and all(_is_number(number) for number in value.values()),
        "an object of finite numbers",
    ),
    "created_at": (_is_text, "a string"),
    "idempotency_key": (_is_text, "a string"),
}
_FILE_FIELDS = {
    "name": (_is_text, "a string"),
    "size": (_is_count, "an integer >= 0"),
    "sha256": (is_sha256, "a sha256"),
}
_TENSOR_FIELDS = {
    "name": (_is_text, "a string"),
    "dtype": (_is_text, "a string"),
    "shape": (_is_shape, "a list of integers >= 0"),
    "nbytes": (_is_count, "an integer >= 0"),
}


def _checked(values: object, fields: Mapping[str, tuple[Callable[[object], bool], str]], source: str) -> dict[str, Any]:
    """Return an object that has exactly the fields, each of its kind."""
    if not isinstance(values, dict):
        raise WeightError(f"{source} is a JSON {type(values).__name__}: must be an object")
    if values.keys() != fields.keys():
        differing = sorted(values.keys() ^ fields.keys())[0]
        fault = "unknown" if differing in values else "missing"
        raise WeightError(f"{source}: the field {_shown(differing)} is {fault}: must be exactly {', '.join(fields)}")
    for name, (test, allowed) in fields.items():
        if not test(values[name]):
            raise WeightError(f"{source}: {name}={_shown(values[name])} is invalid: must be {allowed}")
    return values


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _parse(parsed: object, source: str) -> Manifest:
    values = _checked(parsed, _FIELDS, source)
    del values["format"]
    values["files"] = tuple(
        FileInfo(**_checked(item, _FILE_FIELDS, f"{source}: file {index}"))
        for index, item in enumerate(values["files"])
    )
    tensors = [
        TensorInfo(**_checked(item, _TENSOR_FIELDS, f"{source}: tensor {index}"))
        for index, item in enumerate(values["tensors"])
    ]
    values["tensors"] = tuple(tensor._replace(shape=tuple(tensor.shape)) for tensor in tensors)
    manifest = Manifest(**values)
    _check_consistency(manifest, source)
    return manifest


def _check_consistency(manifest: Manifest, source: str) -> None:
    names = [file.name for file in manifest.files]
    expected = FILES_OF_KIND[manifest.kind]
    if len(names) != len(expected) or set(names) != expected:
        raise WeightError(f"{source}: files are {_shown(names)}: must be {sorted(expected)}, as kind={manifest.kind}")
    is_delta = manifest.kind == "DELTA"
    if is_delta != (manifest.base_sha256 is not None) or (is_delta and manifest.base_version is None):
        raise WeightError(f"{source}: base_sha256 must be given with kind=DELTA, beside base_version, and only then")
    tensor_names = [tensor.name for tensor in manifest.tensors]
    if len(set(tensor_names)) != len(tensor_names):
        raise WeightError(f"{source}: tensors lists a name twice")
    signature = layout_signature(manifest.tensors)
    if signature != manifest.layout_signature:
        raise WeightError(f"{source}: layout_signature={manifest.layout_signature} is not that of tensors: {signature}")
