# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a target's checkpoint, by which servers and trainers notice that they speak of different targets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from adaflash.errors import CheckpointError
from adaflash.models.checkpoint import Checkpoint
from adaflash.models.loader import read_model_config
from adaflash.models.safetensors_file import TensorEntry

_SAMPLE_BYTES = 4096
# Where a generation ends is a choice of whoever serves the model; it changes no weight and no feature.
_IGNORED_FIELDS = ("eos_token_ids",)


def target_digest(directory: Path) -> str:
    """Return the digest of the target in `directory`, the same however its tensors are spread over files.

    It covers the architecture and, for each tensor, name, dtype, shape and 4 KB each of its beginning, middle and
    end, so that 16 GB take well under a second. That tells a fine-tune or another conversion from the original: it
    guards against mix-ups, not against malice.

    Returns:
        64 hexadecimal digits.

    Raises:
        CheckpointError: See `read_model_config` and `Checkpoint`.
    """
    fields = {
        name: value for name, value in asdict(read_model_config(directory)).items() if name not in _IGNORED_FIELDS
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    for name, entry in sorted(Checkpoint(directory).entries.items()):
        digest.update(json.dumps([name, entry.dtype_name, entry.shape]).encode())
        for sample in _samples(entry):
            digest.update(sample)
    return digest.hexdigest()


def _samples(entry: TensorEntry) -> Iterator[bytes]:
    size = min(_SAMPLE_BYTES, entry.num_bytes)
    try:
        with entry.file.open("rb") as stream:
            for offset in (0, (entry.num_bytes - size) // 2, entry.num_bytes - size):
                stream.seek(entry.begin + offset)
                sample = stream.read(size)
                if len(sample) != size:
                    raise CheckpointError(f"{entry.file} is truncated: it ends before byte {entry.end}")
                yield sample
    except OSError as error:
        raise CheckpointError(f"{entry.file} cannot be read: {error}") from error
