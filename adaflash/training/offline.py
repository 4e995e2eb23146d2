# SPDX-License-Identifier: Apache-2.0
"""Training on a fixed set of samples: a part is held out, the rest is trained on, and both ends are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from adaflash.errors import ConfigError
from adaflash.training.replay import ReplayResult, replay
from adaflash.training.replay_window import AnchorBudget, WindowBudget
from adaflash.training.supervision import SkippedTrajectoryError, Supervision
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.trainer_parts import load_parts
from adaflash.training.training_data import TokenSample
from adaflash.training.trajectories import Trajectory

# Called with (anchors trained, anchors in total, loss of the last step).
ProgressFn = Callable[[int, int, float], None]


@dataclass(frozen=True)
class OfflineResult:
    """What training did.

    Attributes:
        before: Rounds replayed on the held-out samples with the drafter as it was; None without held-out samples.
        after: The same with the trained one.
        num_steps: Optimizer steps.
        num_samples: Samples trained on.
        num_held_out: Samples measured on.
        num_tokens: Response tokens trained on.
        skipped: Samples left out, by reason.
        num_skipped_batches: Batches that were not finite.
    """

    before: ReplayResult | None
    after: ReplayResult | None
    num_steps: int
    num_samples: int
    num_held_out: int
    num_tokens: int
    skipped: dict[str, int]
    num_skipped_batches: int


class OfflineTraining:
    """Trains a drafter on samples; every sample counts alike, however late it stands.

    Args:
        config: How; `replay_share`, `window_tokens` and `min_tokens` do not matter here.
        target_directory: The target's checkpoint.
        draft_directory: The drafter's.
        samples: The target's greedy outputs.
        holdout: Share of the samples that is measured on and not trained on, in [0, 1).

    Raises:
        ConfigError: There is nothing to train on, or it does not fit into `window_bytes`.
        CheckpointError: A checkpoint is missing, corrupt, or they do not fit each other.
    """

    def __init__(
        self,
        config: TrainerConfig,
        target_directory: Path,
        draft_directory: Path,
        samples: Sequence[TokenSample],
        holdout: float,
    ) -> None:
        if not 0 <= holdout < 1:
            raise ConfigError(f"holdout={holdout} is invalid: must be in [0, 1)")
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        config = dataclasses.replace(config, replay_share=1.0, window_tokens=max(1, num_tokens))
        self._config = config
        self._parts = load_parts(config, target_directory, draft_directory)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._check_fits(num_tokens)
        order = torch.randperm(len(samples), generator=self._generator).tolist()
        num_held_out = round(holdout * len(samples))
        trajectories = [self._trajectory(samples[i]) for i in order]
        self._measured = self._supervise(trajectories[:num_held_out])
        self._budget = AnchorBudget(WindowBudget(), 1, config.max_epochs)
        self._num_tokens = sum(self._add(trajectory) for trajectory in trajectories[num_held_out:])
        if not self._num_tokens:
            raise ConfigError(
                f"there is nothing to train on: {len(samples)} samples, skipped {self._skipped or 'none'}"
            )

    @property
    def _skipped(self) -> dict[str, int]:
        return dict(self._parts.window.skipped)

    def _check_fits(self, num_tokens: int) -> None:
        needed = num_tokens * self._parts.supervisor.bytes_per_token
        if needed > self._config.window_bytes:
            raise ConfigError(
                f"window_bytes={self._config.window_bytes} is invalid: must be >= {needed} for {num_tokens} tokens"
            )

    def _trajectory(self, sample: TokenSample) -> Trajectory:
        return Trajectory(
            request_id="",
            sample_index=0,
            token_ids=sample.token_ids,
            num_prompt_tokens=sample.num_prompt_tokens,
            rounds=[],
            drafter_version=0,
            target_digest=self._parts.target_digest,
            temperature=0.0,
        )

    def _add(self, trajectory: Trajectory) -> int:
        num_eligible = self._parts.window.add(trajectory)
        self._budget.grant(num_eligible)
        return num_eligible + 1 if num_eligible else 0

    def run(self, progress: ProgressFn | None = None) -> OfflineResult:
        """Train `max_epochs` and return what it brought."""
        before = self._measure()
        total = max(1, round(self._budget.state.credit))
        num_steps = num_skipped = 0
        while self._budget.may_step():
            batch = self._parts.window.draw(self._config.trajectories_per_step, self._generator)
            report = self._parts.learner.step(batch, self._generator) if batch else None
            self._budget.spend(self._config.anchors_per_step if report is None else report.num_anchors)
            if report is None:
                continue
            num_steps, num_skipped = num_steps + report.is_applied, num_skipped + (not report.is_applied)
            if progress is not None:
                progress(min(total, total - round(self._budget.state.credit)), total, report.loss)
        window = self._parts.window
        return OfflineResult(
            before,
            self._measure(),
            num_steps,
            len(window),
            len(self._measured),
            self._num_tokens,
            self._skipped,
            num_skipped,
        )

    def write(self, directory: Path) -> None:
        """Write the trained drafter into an existing directory."""
        self._parts.learner.write(directory)

    def _measure(self) -> ReplayResult | None:
        drafter = self._parts.learner.drafter
        results = [replay(drafter, item.sequence, item.taps.float()) for item in self._measured]
        return ReplayResult.total(results) if results else None

    def _supervise(self, trajectories: list[Trajectory]) -> list[Supervision]:
        supervised = []
        for trajectory in trajectories:
            try:
                self._parts.supervisor.check(trajectory)
                supervised.append(self._parts.supervisor.supervise(trajectory))
            except SkippedTrajectoryError as error:
                self._parts.window.skipped[error.reason] += 1
        return supervised
