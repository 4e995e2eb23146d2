# SPDX-License-Identifier: Apache-2.0
"""Puts together what training needs: devices, the target's head, the learner, and the window it draws from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from adaflash.models.digest import target_digest
from adaflash.ops.backend import Backend
from adaflash.ops.registry import load_backend
from adaflash.training.drafter_layout import DrafterLayout
from adaflash.training.learner import Learner
from adaflash.training.payload import PayloadChecker
from adaflash.training.replay_window import ReplayWindow
from adaflash.training.supervision import Supervisor
from adaflash.training.target_head import TargetHead
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.weight_store import WeightStore


@dataclass(frozen=True)
class TrainerParts:
    """A target and a drafter, ready to be trained.

    Attributes:
        target_digest: Of the target.
        draft_directory: Where training starts from.
        learner: Changes the drafter.
        supervisor: Gets the target's features.
        window: Trajectories to draw from.
    """

    target_digest: str
    draft_directory: Path
    learner: Learner
    supervisor: Supervisor
    window: ReplayWindow


def load_parts(config: TrainerConfig, target_directory: Path, draft_directory: Path) -> TrainerParts:
    """Load drafter and target's head for training.

    Args:
        config: What to train and how; its `model` and `draft` are not looked at.
        target_directory: The target's checkpoint.
        draft_directory: The drafter's.

    Raises:
        CheckpointError: A checkpoint is missing, corrupt, or they do not fit each other.
        BackendError: The device is not available.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    backend = load_backend(config.device)
    digest = target_digest(target_directory)
    head = TargetHead(target_directory, backend)
    # A device's own ops need not be differentiable, the reference is.
    learner = Learner(draft_directory, head, Backend(backend.device), config)
    taps = learner.drafter.tap_layer_ids
    supervisor = Supervisor(target_directory, head, backend, taps, digest, config.max_trajectory_tokens)
    max_tokens = min(config.window_tokens, config.window_bytes // supervisor.bytes_per_token)
    window = ReplayWindow(supervisor, max_tokens, config.replay_share, config.recency_tokens)
    return TrainerParts(digest, draft_directory, learner, supervisor, window)


def open_store(config: TrainerConfig, draft_directory: Path, digest: str) -> WeightStore:
    """Open the store of a config; it refuses whatever servers of this target and drafter would refuse.

    Raises:
        ConfigError: Another process writes to it, or it cannot be used.
        CheckpointError: The drafter is missing or corrupt.
    """
    checker = PayloadChecker(DrafterLayout.of(draft_directory), digest)
    return WeightStore(config.directory("store"), keep=config.keep_versions, check=checker.check)
