# SPDX-License-Identifier: Apache-2.0
"""A directory of safetensors weights: which tensors it has, and loading them into a model's parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from adaflash.errors import CheckpointError
from adaflash.models.json_config import JsonConfig
from adaflash.models.safetensors_file import TensorEntry, read_header

ProgressFn = Callable[[int, int], None]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_LISTED = 8


class Checkpoint:
    """The tensors of a directory, by name; headers are read and checked at once, data when asked for.

    Attributes:
        directory: Where the files are.
        entries: Every tensor of every file.

    Raises:
        CheckpointError: The directory or a file is missing, truncated or corrupt.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint {directory} is not a directory")
        self.directory = directory
        if (directory / SINGLE_FILE).is_file():
            self.entries: Mapping[str, TensorEntry] = read_header(directory / SINGLE_FILE)
        elif (directory / INDEX_FILE).is_file():
            self.entries = _read_shards(directory)
        else:
            found = ", ".join(sorted(path.name for path in directory.iterdir())[:_MAX_LISTED]) or "no files"
            raise CheckpointError(f"checkpoint {directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; found {found}")

    def load(
        self,
        slots: Mapping[str, Tensor],
        owner: str,
        ignored: Iterable[str] = (),
        progress: ProgressFn | None = None,
    ) -> None:
        """Copy every tensor into the slot of its name, one at a time, casting to the slot's dtype.

        Args:
            slots: Contiguous destinations, written in place; from `layers.checkpoint_slots`.
            owner: What is being loaded, for messages.
            ignored: Regular expressions (full match) of names that may be there and are not needed.
            progress: Called with (bytes done, bytes in total) after each chunk.

        Raises:
            CheckpointError: A tensor is missing, unexpected or misshapen; nothing is written then.
        """
        self._check_fit(slots, owner, ignored)
        total = sum(self.entries[name].num_bytes for name in slots)
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done, total)

        for name in sorted(slots, key=lambda name: (self.entries[name].file, self.entries[name].begin)):
            self.entries[name].read_into(slots[name], advance)

    def _check_fit(self, slots: Mapping[str, Tensor], owner: str, ignored: Iterable[str]) -> None:
        patterns = [re.compile(pattern) for pattern in ignored]
        missing = [name for name in slots if name not in self.entries]
        unexpected = [
            f"{name} ({entry.file.name})"
            for name, entry in self.entries.items()
            if name not in slots and not any(pattern.fullmatch(name) for pattern in patterns)
        ]
        misshapen = [
            f"{name} ({entry.file.name}): expected {list(slots[name].shape)}, found {list(entry.shape)}"
            for name, entry in self.entries.items()
            if name in slots and slots[name].shape != entry.shape
        ]
        faults = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
        found = [f"{len(names)} {fault}: {_shorten(names)}" for fault, names in faults.items() if names]
        if found:
            raise CheckpointError(f"checkpoint {self.directory} does not fit {owner}; tensors " + "; ".join(found))


def _shorten(names: list[str]) -> str:
    listed = ", ".join(names[:_MAX_LISTED])
    return listed if len(names) <= _MAX_LISTED else f"{listed} and {len(names) - _MAX_LISTED} more"


def _read_shards(directory: Path) -> dict[str, TensorEntry]:
    """Read the headers of all files the index names, and check that each tensor is where the index says."""
    index = JsonConfig.read(directory / INDEX_FILE)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise index.error("weight_map", "an object of file names by tensor name")
    entries: dict[str, TensorEntry] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{index.path}: weight_map names the file {file!r}: must lie beside the index")
        if not (directory / file).is_file():
            raise CheckpointError(f"{directory / file} does not exist, but {INDEX_FILE} names it")
        for name, entry in read_header(directory / file).items():
            if name in entries:
                raise CheckpointError(f"tensor {name} is both in {entries[name].file} and in {entry.file}")
            entries[name] = entry
    for name, file in weight_map.items():
        if name not in entries or entries[name].file.name != file:
            raise CheckpointError(f"{directory / file} lacks the tensor {name} that {INDEX_FILE} places there")
    return entries
