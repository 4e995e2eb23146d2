# SPDX-License-Identifier: Apache-2.0
"""Where a measurement was made: versions, processor, threads and commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from adaflash import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "torch_npu")


def environment() -> dict[str, object]:
    """Return what a reader needs to know to repeat a measurement."""
    import torch

    from adaflash.ops.device_name import cpu_model

    return {
        "adaflash": __version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }


def source_commit() -> str | None:
    """Return the commit of the source tree this package runs from, `-dirty` if changed; None when it is unknown."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
