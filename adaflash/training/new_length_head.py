# SPDX-License-Identifier: Apache-2.0
"""Gives a drafter checkpoint a length head that has still to be trained."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from adaflash.errors import CheckpointError
from adaflash.models.checkpoint import Checkpoint
from adaflash.speculative.drafter_config import NESTED, load_drafter_config
from adaflash.speculative.drafter_loader import LENGTH_HEAD_PREFIX
from adaflash.speculative.length_head import ThresholdLengthHead
from adaflash.training.manifest import CONFIG_FILE, MODEL_FILE

BOTTLENECK_DIM = 256  # as in published checkpoints


def add_length_head(source: Path, destination: Path, seed: int, bottleneck_dim: int = BOTTLENECK_DIM) -> None:
    """Write the drafter in `source` with a new length head, in fp32, to `destination`.

    Args:
        source: A drafter's checkpoint.
        destination: An existing directory.
        seed: Of the head's random weights.
        bottleneck_dim: Width of the head.

    Raises:
        CheckpointError: The drafter is missing or corrupt, or has a length head.
    """
    config = load_drafter_config(source)
    if config.length_head_dim is not None:
        raise CheckpointError(f"drafter {source} has a length head already: it is trained as it is")
    tensors = {name: entry.read() for name, entry in Checkpoint(source).entries.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = ThresholdLengthHead(config.hidden_size, bottleneck_dim)
    tensors |= {LENGTH_HEAD_PREFIX + name: tensor for name, tensor in head.state_dict().items()}
    raw = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    raw[NESTED] = (raw.get(NESTED) or {}) | {
        "use_thresh_head_two_model": True,
        "thresh_head_direct_len": True,
        "thresh_head_bottleneck_dim": bottleneck_dim,
    }
    save_file(tensors, destination / MODEL_FILE)
    (destination / CONFIG_FILE).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
