# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: its checked header, and tensors read in small chunks straight to where they belong.

The library's own loader maps the file, so that every page read stays in the process until the file is closed: twice
the checkpoint at the peak. Reading chunks keeps the peak at the parameters plus `_CHUNK_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from adaflash.errors import CheckpointError
from adaflash.models.strict_json import parse_json

_CHUNK_BYTES = 16 << 20
_HEADER_LIMIT_BYTES = 100_000_000  # as in the reference implementation

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes `begin` to `end` of `file`, row-major."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.end - self.begin

    @property
    def dtype_name(self) -> str:
        """The dtype as the format spells it, e.g. `BF16`."""
        return next(name for name, dtype in _DTYPES.items() if dtype == self.dtype)

    def read_into(self, destination_: Tensor, on_bytes: Callable[[int], None] | None = None) -> None:
        """Copy the tensor into `destination_` (contiguous, same shape), casting to its dtype.

        Args:
            destination_: Written in place, on any device.
            on_bytes: Called with the file bytes of each chunk.

        Raises:
            CheckpointError: The file cannot be read, or is shorter than its header says.
        """
        assert destination_.shape == self.shape, f"destination {tuple(destination_.shape)} differs from {self.shape}"
        flat = destination_.view(-1)
        itemsize = self.dtype.itemsize
        buffer = torch.empty(min(self.num_bytes, _CHUNK_BYTES), dtype=torch.uint8)
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.begin)
                for start in range(0, self.num_bytes, _CHUNK_BYTES):
                    chunk = buffer[: min(_CHUNK_BYTES, self.num_bytes - start)]
                    if stream.readinto(chunk.numpy().data) != len(chunk):
                        raise CheckpointError(f"{self.file} is truncated: it ends before byte {self.end}")
                    first = start // itemsize
                    flat[first : first + len(chunk) // itemsize].copy_(chunk.view(self.dtype))
                    if on_bytes is not None:
                        on_bytes(len(chunk))
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read: {error}") from error

    def read(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the tensor, cast to `dtype` unless None."""
        tensor = torch.empty(self.shape, dtype=dtype or self.dtype, device=device)
        self.read_into(tensor)
        return tensor


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, after checking that the file holds exactly what it lists.

    Raises:
        CheckpointError: The file is missing, truncated or corrupt, or a dtype is not supported.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if file_bytes < 8 or header_bytes > min(_HEADER_LIMIT_BYTES, file_bytes - 8):
                raise CheckpointError(
                    f"{path} is corrupt or truncated: it has {file_bytes} bytes, its header claims {header_bytes}"
                )
            header = parse_json(stream.read(header_bytes))
        if not isinstance(header, dict):
            raise CheckpointError(f"{path} is corrupt: its header is not a safetensors header: no JSON object")
        entries = {
            name: _parse_entry(path, name, fields, 8 + header_bytes)
            for name, fields in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is corrupt: its header is not a safetensors header: {error}") from error
    _check_layout(path, entries, 8 + header_bytes, file_bytes)
    return entries


def _parse_entry(path: Path, name: str, fields: object, data_begin: int) -> TensorEntry:
    dtype_name, shape, offsets = (
        (fields.get("dtype"), fields.get("shape"), fields.get("data_offsets"))
        if isinstance(fields, dict)
        else (None, None, None)
    )
    if not (isinstance(dtype_name, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{path} is corrupt: tensor {name} has the header entry {fields!r}")
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        allowed = ", ".join(_DTYPES)
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype_name}: must be one of {allowed}")
    begin, end = offsets
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{path} is corrupt: tensor {name} {shape} {dtype_name} takes {num_bytes} bytes, "
            f"its header entry has {end - begin}"
        )
    return TensorEntry(path, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(path: Path, entries: dict[str, TensorEntry], data_begin: int, file_bytes: int) -> None:
    """Tensors must lie end to end and fill the file, as the format demands."""
    expected = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != expected:
            raise CheckpointError(
                f"{path} is corrupt: tensor {name} begins at byte {entry.begin}: must begin at {expected}"
            )
        expected = entry.end
    if expected != file_bytes:
        fault = "truncated" if file_bytes < expected else "corrupt"
        raise CheckpointError(f"{path} is {fault}: it has {file_bytes} bytes, its header describes {expected}")
