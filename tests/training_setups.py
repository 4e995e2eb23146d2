# SPDX-License-Identifier: Apache-2.0
"""Trainers over tiny models, and trajectories for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adaflash.models.digest import target_digest
from adaflash.training.trainer import Trainer
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.trainer_parts import TrainerParts, load_parts, open_store
from adaflash.training.trainer_state import StateDirectory
from adaflash.training.trajectories import RoundCounts, Trajectory, TrajectoryFeatures, TrajectorySpool
from adaflash.training.weight_store import WeightStore

VOCAB_SIZE = 97


@dataclass(frozen=True)
class TrainingSetup:
    """A tiny target and a drafter for it."""

    target: Path
    drafter: Path

    def parts(self, **settings: Any) -> TrainerParts:
        return load_parts(tiny_config(**settings), self.target, self.drafter)

    def trajectory(self, num_prompt: int = 4, num_response: int = 20, seed: int = 0, **fields: Any) -> Trajectory:
        """Random tokens; without features."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCAB_SIZE - 1, (num_prompt + num_response,), generator=generator).tolist()
        return self.trajectory_of(ids, num_prompt, **fields)

    def trajectory_of(self, token_ids: Sequence[int], num_prompt: int, **fields: Any) -> Trajectory:
        made = Trajectory(
            request_id="request",
            sample_index=0,
            token_ids=list(token_ids),
            num_prompt_tokens=num_prompt,
            rounds=[RoundCounts(3, 1)],
            drafter_version=0,
            target_digest=target_digest(self.target),
            temperature=0.0,
        )
        return replace(made, **fields)

    def captured(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with features, as a server captures them."""
        supervision = self.parts().supervisor.supervise(trajectory)
        return replace(trajectory, features=TrajectoryFeatures(supervision.taps.numpy(), supervision.hidden.numpy()))


@dataclass
class RunningTrainer:
    """A trainer and what it works with; `close` lets another take the directories."""

    trainer: Trainer
    parts: TrainerParts
    store: WeightStore
    spool: TrajectorySpool
    states: StateDirectory

    def close(self) -> None:
        self.spool.close()
        self.store.close()
        self.states.close()


def tiny_config(**settings: Any) -> TrainerConfig:
    """Settings that learn quickly on the CPU."""
    return TrainerConfig(**{"device": "cpu", "lr": 3e-3, "min_tokens": 1, **settings})


def open_trainer(setup: TrainingSetup, root: Path, **settings: Any) -> RunningTrainer:
    """Open a trainer whose directories lie in `root`."""
    directories = {name: str(root / name) for name in ("store", "spool", "state")}
    config = tiny_config(**directories, **settings)
    parts = load_parts(config, setup.target, setup.drafter)
    store = open_store(config, setup.drafter, parts.target_digest)
    spool = TrajectorySpool(config.directory("spool"), 64 << 20, 1e6)
    states = StateDirectory(config.directory("state"))
    try:
        trainer = Trainer(config, parts, store, spool, states)
    except BaseException:
        spool.close()
        store.close()
        states.close()
        raise
    return RunningTrainer(trainer, parts, store, spool, states)
