# SPDX-License-Identifier: Apache-2.0
"""What the weights of a drafter must look like to take the place of those being served."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adaflash.errors import CheckpointError
from adaflash.models.checkpoint import Checkpoint
from adaflash.models.safetensors_file import TensorEntry
from adaflash.speculative.drafter_config import DrafterConfig, load_drafter_config
from adaflash.speculative.drafter_loader import canonical_name
from adaflash.training.manifest import TensorInfo, layout_signature

_CHUNK_BYTES = 4 << 20
# Tensors that published checkpoints may have, and no drafter needs.
_IGNORED = re.compile(r"t2d|.*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class DrafterLayout:
    """The tensors of the drafter being served, under the names they have in every version.

    Attributes:
        config: Its architecture, which no version may change.
        tensors: What every version holds, no more and no less, by name.
        constants: sha256 of the bytes of the tensors that are not learned (`d2t`), by name.
    """

    config: DrafterConfig
    tensors: Mapping[str, TensorInfo]
    constants: Mapping[str, str]

    @property
    def signature(self) -> str:
        """Hash of names, dtypes and shapes."""
        return layout_signature(self.tensors.values())

    @staticmethod
    def of(directory: Path) -> DrafterLayout:
        """Return the layout of the drafter checkpoint in `directory`: its dtypes, not those it is served in.

        Raises:
            CheckpointError: It is missing, corrupt, or no drafter this package serves.
        """
        tensors, constants = {}, {}
        for original, entry in Checkpoint(directory).entries.items():
            name = canonical_name(original)
            if _IGNORED.fullmatch(name):
                continue
            if name in tensors:
                raise CheckpointError(f"drafter {directory}: tensor {name} is there twice, as {original} and otherwise")
            tensors[name] = tensor_info(name, entry)
            if not entry.dtype.is_floating_point:
                constants[name] = hash_tensor(entry)
        return DrafterLayout(load_drafter_config(directory), tensors, constants)


def tensor_info(name: str, entry: TensorEntry) -> TensorInfo:
    """Return what a header says of a tensor, without its place in the file."""
    return TensorInfo(name, entry.dtype_name, entry.shape, entry.num_bytes)


def raw_chunks(entry: TensorEntry) -> Iterator[bytearray]:
    """Yield the bytes of a tensor, in order, in chunks that hold whole elements.

    Raises:
        CheckpointError: The file cannot be read, or ends early.
    """
    left = entry.num_bytes
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.begin)
            while left:
                chunk = bytearray(min(left, _CHUNK_BYTES))
                if stream.readinto(chunk) != len(chunk):
                    raise CheckpointError(f"{entry.file} is truncated: it ends before byte {entry.end}")
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise CheckpointError(f"{entry.file} cannot be read: {error}") from error


def hash_tensor(entry: TensorEntry) -> str:
    """Return the sha256 of a tensor's bytes."""
    digest = hashlib.sha256()
    for chunk in raw_chunks(entry):
        digest.update(chunk)
    return digest.hexdigest()
