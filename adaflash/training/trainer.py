# SPDX-License-Identifier: Apache-2.0
"""The trainer: takes trajectories, trains while there is something new to learn, and publishes versions.

Synchronous, of one thread; whoever serves what it publishes runs beside it.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from adaflash.errors import ConfigError, PayloadError, WeightError
from adaflash.training.learner import StepReport
from adaflash.training.replay_window import AnchorBudget
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.trainer_parts import TrainerParts
from adaflash.training.trainer_state import StateDirectory, TrainerState
from adaflash.training.trajectories import Position, Trajectory, TrajectorySpool
from adaflash.training.version_directory import Publication, StoredVersion
from adaflash.training.weight_store import WeightStore

logger = logging.getLogger(__name__)

# How often an idle trainer looks for new trajectories.
_POLL_S = 0.5
_RECORDS_PER_READ = 16


@dataclass
class TrainerCounters:
    """What a trainer did since it was started.

    Attributes:
        num_steps: Optimizer steps.
        num_tokens: Labels they were about.
        num_skipped_batches: Batches whose loss or gradient was not finite; they were not applied.
        num_published: Versions.
        num_failed_publications: That the disk or a check refused.
        num_resets: Times it went on from other weights than its own.
        num_damaged_states: Saved states that could not be read.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_skipped_batches: int = 0
    num_published: int = 0
    num_failed_publications: int = 0
    num_resets: int = 0
    num_damaged_states: int = 0


class TrainerStatus(NamedTuple):
    """A snapshot for people and metrics; `last` are the figures of the last step, empty before the first."""

    counters: TrainerCounters
    base_version: int
    train_step: int
    is_training: bool
    num_window_tokens: int
    num_trajectories: int
    num_recomputed: int
    skipped: Mapping[str, int]
    last: Mapping[str, float]


class _Origin(Protocol):
    """Says what it was trained for."""

    @property
    def target_digest(self) -> str: ...

    @property
    def layout_signature(self) -> str: ...


class _Means:
    """Means of figures over the steps of a version; a figure that was missing in a step does not count there."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    def add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._sums[name] += value
            self._counts[name] += 1

    def values(self) -> dict[str, float]:
        return {name: total / self._counts[name] for name, total in self._sums.items()}


class Trainer:
    """Trains a drafter on trajectories. Not thread-safe but for `status`.

    Args:
        config: How; see `TrainerConfig`.
        parts: What is trained.
        store: Gets the versions; also tells which turned out bad, and which somebody activated instead.
        spool: The trajectories on disk; None when only `add` brings some.
        states: What it continues from and saves to; None keeps nothing.

    Raises:
        ConfigError: State or store belong to another target or drafter.
    """

    def __init__(
        self,
        config: TrainerConfig,
        parts: TrainerParts,
        store: WeightStore,
        spool: TrajectorySpool | None = None,
        states: StateDirectory | None = None,
    ) -> None:
        self._config, self._parts, self._store = config, parts, store
        self._spool, self._states = spool, states
        self._learner, self._window = parts.learner, parts.window
        self._generator = torch.Generator().manual_seed(config.seed)
        self._state = TrainerState(parts.target_digest, parts.learner.layout.signature, _new_lineage())
        self._counters = TrainerCounters()
        self._means, self._last = _Means(), dict[str, float]()
        self._resume()
        self._budget = AnchorBudget(self._state.budget, config.min_tokens, config.max_epochs)
        self._read_position = Position(0, 0)
        self._next_publication = time.monotonic() + config.publish_interval_s
        self.follow_store()

    # ---- one thing at a time ---------------------------------------------------------------------------------

    @property
    def status(self) -> TrainerStatus:
        """What it did and does; from any thread."""
        return TrainerStatus(
            self._counters,
            self._state.base_version,
            self._state.num_steps,
            self._state.budget.is_training,
            self._window.num_tokens,
            self._window.num_added,
            self._parts.supervisor.num_recomputed,
            dict(self._window.skipped),
            dict(self._last),
        )

    def add(self, trajectory: Trajectory) -> None:
        """Take a new trajectory; one that cannot be learned from is counted by reason."""
        self._budget.grant(self._window.add(trajectory))

    def take_new(self) -> None:
        """Take what came to the spool; what was counted before a restart fills the window without counting again."""
        if self._spool is None:
            return
        while records := self._spool.read(self._read_position, _RECORDS_PER_READ):
            for record in records:
                if record.end <= self._state.spool_position:
                    self._window.add(record.trajectory)
                else:
                    self.add(record.trajectory)
                    self._state.spool_position = (record.end.segment, record.end.offset)
                self._read_position = record.end

    def may_step(self) -> bool:
        """Return whether there is enough that is new to be trained on."""
        return self._budget.may_step()

    def step(self) -> StepReport | None:
        """Take an optimizer step on some trajectories of the window; None when there is none to be had."""
        batch = self._window.draw(self._config.trajectories_per_step, self._generator)
        report = self._learner.step(batch, self._generator) if batch else None
        if report is None:
            self._budget.spend(self._config.anchors_per_step)
            return None
        self._budget.spend(report.num_anchors)
        if not report.is_applied:
            self._skip(report)
            return report
        self._state.num_steps += 1
        self._counters.num_steps += 1
        self._counters.num_tokens += report.num_tokens
        self._last = report.figures()
        self._means.add(self._last)
        return report

    def _skip(self, report: StepReport) -> None:
        self._state.skipped_batches += 1
        self._counters.num_skipped_batches += 1
        logger.warning(
            "a batch is skipped, it is not finite loss=%s num_skipped=%d", report.loss, self._state.skipped_batches
        )

    def publish(self) -> int:
        """Save the state, publish the weights and return the version's number.

        Raises:
            WeightError: The store refuses them, or the disk failed.
            OSError: The state could not be saved.
        """
        self.save()
        state = self._state
        version = self._store.publish(self._learner.write, self._publication())
        num_steps = state.num_steps - state.published_step
        state.base_version, state.published_step = version, state.num_steps
        self._counters.num_published += 1
        figures = self._means.values()
        logger.info(
            "published version=%d train_step=%d steps=%d loss=%.4f acceptance_length=%.3f window_tokens=%d "
            "trajectories=%d skipped=%s",
            version,
            state.num_steps,
            num_steps,
            figures.get("loss", float("nan")),
            figures.get("acceptance_length", float("nan")),
            self._window.num_tokens,
            self._window.num_added,
            dict(self._window.skipped),
        )
        self._means = _Means()
        return version

    def _publication(self) -> Publication:
        state = self._state
        base = state.base_version or None
        return Publication(
            target_digest=state.target_digest,
            train_step=state.num_steps,
            metrics=self._means.values(),
            kind=self._config.publish_kind if base is not None and self._has(base) else "FULL",
            base_version=base,
            idempotency_key=f"{state.lineage}:{state.num_steps}",
        )

    def _has(self, version: int) -> bool:
        try:
            self._store.get(version)
        except WeightError:
            return False
        return True

    def save(self) -> None:
        """Save everything a restart needs.

        Raises:
            OSError: The disk is full or failed; what was saved before is whole.
        """
        if self._states is not None:
            self._states.save(self._state, self._generator, self._learner.state())

    # ---- whose weights ---------------------------------------------------------------------------------------

    def follow_store(self) -> None:
        """Go on from other weights when the last version turned out bad, or somebody published another one."""
        newest, state = self._store.newest(), self._state
        version = 0 if newest is None else newest.version
        if newest is not None and newest.version > state.base_version:
            if newest.manifest.idempotency_key.partition(":")[0] == state.lineage:
                state.base_version = newest.version  # Published just before a crash.
                return
        elif state.base_version not in self._store.bad:
            return
        self._take_over(newest, "bad" if state.base_version in self._store.bad else "superseded")
        assert state.base_version == version, "it goes on from the newest good version"

    def _take_over(self, stored: StoredVersion | None, reason: str) -> None:
        """Go on from a version's weights, or from the start, with fresh moments."""
        state = self._state
        previous = state.base_version
        if stored is not None:
            self._check_belongs(f"weight store {self._store.root}", stored.manifest)
        self._learner.load_weights(self._parts.draft_directory if stored is None else stored.directory)
        state.base_version = 0 if stored is None else stored.version
        state.published_step, state.lineage = state.num_steps, _new_lineage()
        self._means = _Means()
        self._counters.num_resets += 1
        logger.warning(
            "training goes on from other weights, with fresh moments version=%d instead_of=%d reason=%s",
            state.base_version,
            previous,
            reason,
        )

    def _resume(self) -> None:
        saved = None if self._states is None else self._states.load()
        if self._states is not None:
            self._counters.num_damaged_states = self._states.num_damaged
        if saved is None:
            return
        assert self._states is not None, "a state was loaded from somewhere"
        self._check_belongs(f"trainer state {self._states.root}", saved.state)
        try:
            self._learner.load_state(saved.tensors)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"trainer state {self._states.root} is of other settings: {error}") from error
        self._generator.set_state(saved.rng)
        self._state = saved.state
        logger.info("training is resumed train_step=%d version=%d", saved.state.num_steps, saved.state.base_version)

    def _check_belongs(self, owner: str, found: _Origin) -> None:
        expected = (self._parts.target_digest, self._learner.layout.signature)
        for name, value, wanted in zip(
            ("target_digest", "layout_signature"),
            (found.target_digest, found.layout_signature),
            expected,
            strict=True,
        ):
            if value != wanted:
                raise ConfigError(f"{owner} is of another training: {name}={value}: must be {wanted}; give another")

    # ---- the loop --------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Train and publish until `stop`; then save the state."""
        while not stop.is_set():
            self.take_new()
            self.follow_store()
            has_stepped = self.may_step()
            if has_stepped:
                self.step()
            if time.monotonic() >= self._next_publication:
                self._publish_if_due()
            if not has_stepped:
                stop.wait(_POLL_S)
        self.save()

    def _publish_if_due(self) -> None:
        self._next_publication = time.monotonic() + self._config.publish_interval_s
        if self._state.num_steps == self._state.published_step:
            return
        try:
            self.publish()
        except PayloadError as error:
            self._counters.num_failed_publications += 1
            logger.error("the weights cannot be served reason=%s", error)
            self._take_over(self._store.newest(), "refused")
        except (WeightError, OSError) as error:
            self._counters.num_failed_publications += 1
            logger.error("nothing was published, it is tried again later reason=%s", error)


def _new_lineage() -> str:
    return uuid.uuid4().hex
