# SPDX-License-Identifier: Apache-2.0
"""Versions with something wrong: a chunk on its way, a tensor, or a tensor that the manifest lies about."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from adaflash.durable_files import hash_file
from adaflash.training.manifest import MANIFEST_FILE, MODEL_FILE, FileInfo, layout_signature
from adaflash.training.version_directory import StoredVersion, _read_tensors
from tests.spoiling import SPOILS, Spoil
from tests.versions import Tensors

# What a manifest says wrongly: nothing, the hash of the layout, or every name, shape and dtype too.
Lie = Literal["nothing", "signature", "tensors"]
LIES: tuple[Lie, ...] = ("nothing", "signature", "tensors")
Change = Callable[[Tensors], None]


def transpose(tensors: Tensors) -> None:
    tensors["fc.weight"] = np.ascontiguousarray(tensors["fc.weight"].T)


def narrow(tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].astype(np.float16)


def omit(tensors: Tensors) -> None:
    del tensors["norm.weight"]


def rename(tensors: Tensors) -> None:
    tensors["norm.weights"] = tensors.pop("norm.weight")


def add(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = np.ones((97, 32), np.float32)


def not_a_number(tensors: Tensors) -> None:
    _set_last(tensors, np.nan)


def infinite(tensors: Tensors) -> None:
    _set_last(tensors, -np.inf)


def _set_last(tensors: Tensors, value: float) -> None:
    values = tensors["layers.1.mlp.down_proj.weight"].copy()
    values[-1, -1] = value
    tensors["layers.1.mlp.down_proj.weight"] = values


def overflow(tensors: Tensors) -> None:
    """Finite weights that compute something that is not."""
    tensors["norm.weight"] = np.full_like(tensors["norm.weight"], 3e38)


class Fault(NamedTuple):
    """What is wrong with a version: how one of its chunks is spoilt, or what its tensors and its manifest are."""

    spoil: Spoil | None = None
    change: Change | None = None
    lie: Lie = "nothing"


FAULTS = (
    *(Fault(spoil=spoil) for spoil in SPOILS),
    *(Fault(change=change, lie=lie) for change in (transpose, narrow, omit, rename, add) for lie in LIES),
    *(Fault(change=change) for change in (not_a_number, infinite, overflow)),
)


def write_changed(stored: StoredVersion, change: Change, lie: Lie) -> StoredVersion:
    """Change the tensors of a version that is about to be published, and its manifest as far as it does not lie."""
    directory, manifest = stored.directory, stored.manifest
    tensors: Tensors = load_file(directory / MODEL_FILE)
    change(tensors)
    save_file(tensors, directory / MODEL_FILE)
    files = tuple(
        FileInfo(file.name, (directory / file.name).stat().st_size, hash_file(directory / file.name))
        for file in manifest.files
    )
    found = _read_tensors(directory / MODEL_FILE)
    manifest = dataclasses.replace(
        manifest,
        files=files,
        tensors=manifest.tensors if lie == "tensors" else found,
        layout_signature=layout_signature(found) if lie == "nothing" else manifest.layout_signature,
    )
    data = manifest.to_json()
    (directory / MANIFEST_FILE).write_bytes(data)
    return StoredVersion(directory, manifest, len(data), hashlib.sha256(data).hexdigest())
