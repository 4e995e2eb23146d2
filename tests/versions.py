# SPDX-License-Identifier: Apache-2.0
"""Versions of a tiny drafter, to publish and to spoil."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from adaflash.training.version_directory import Publication

Tensors = dict[str, npt.NDArray[np.generic]]

TARGET_DIGEST = "digest-of-the-target"


def tiny_drafter(folder: Path, draft_vocab_size: int | None = None) -> Path:
    """Write a drafter with a length head, about 80 KB, and return its directory."""
    from tests.tiny_drafters import write_tiny_drafter  # needs torch, which a trainer's process does not

    target = folder / "target"
    target.mkdir(parents=True)
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "vocab_size": 97, "max_position_embeddings": 512}
    (target / "config.json").write_text(json.dumps(sizes))
    return write_tiny_drafter(folder / "drafter", target, draft_vocab_size=draft_vocab_size, length_head=True)


def publication(train_step: int = 1, **fields: object) -> Publication:
    """Return what a publisher says by default."""
    return Publication(target_digest=TARGET_DIGEST, train_step=train_step, **fields)  # type: ignore[arg-type]


def write_small(seed: int, num_values: int = 64) -> Callable[[Path], None]:
    """Return a writer of a version with two float32 tensors, `num_values` and 3 values, and a config."""

    def write(directory: Path) -> None:
        rng = np.random.default_rng(seed)
        tensors: Tensors = {
            "fc.weight": rng.standard_normal((num_values // 8, 8)).astype(np.float32),
            "norm.weight": np.ones(3, np.float32),
        }
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({"seed": 0}))

    return write


def write_like(drafter: Path, seed: int, change: Callable[[Tensors], object] | None = None) -> Callable[[Path], None]:
    """Return a writer of the drafter in `drafter` with its float32 weights moved a little, then `change`d."""

    def write(directory: Path) -> None:
        rng = np.random.default_rng(seed)
        tensors: Tensors = load_file(drafter / "model.safetensors")
        for name, values in tensors.items():
            if values.dtype == np.float32:
                tensors[name] = values + 0.01 * rng.standard_normal(values.shape).astype(np.float32)
        if change is not None:
            change(tensors)
        save_file(tensors, directory / "model.safetensors")
        shutil.copy(drafter / "config.json", directory / "config.json")

    return write
