# SPDX-License-Identifier: Apache-2.0
"""Turns finished samples into trajectories, off the hot path: what a trainer learns the drafter from."""

from __future__ import annotations

import logging
import queue
import random
import threading
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from adaflash.cache.block_manager import BlockManager
from adaflash.config import Supervision
from adaflash.engine.features import FeaturePool
from adaflash.engine.request_state import Sample
from adaflash.engine.runner import Runner
from adaflash.errors import ConfigError
from adaflash.request import Request
from adaflash.training.trajectories import Trajectory

logger = logging.getLogger(__name__)

# Below this share of free KV blocks a step waits until the blocks being read are given back: that takes milliseconds,
# a preemption costs a prefill.
_SCARCE = 0.125


class TrajectoryOutbox(Protocol):
    """Where trajectories go, e.g. a TrajectorySpool."""

    def put(self, trajectory: Trajectory) -> bool:
        """Take a trajectory without waiting; False when it was dropped."""


@dataclass(frozen=True)
class CaptureConfig:
    """What is captured, and for whom.

    Attributes:
        outbox: Takes the trajectories; called from a thread of its own.
        target_digest: Of the target being served.
        supervision: `captured` keeps the target's features of every token, `recompute` only the tokens.
        sampling_rate: Share of the requests that are captured, in [0, 1]; a request may forbid it.
        min_response_tokens: Shorter samples teach too little, >= 2.
    """

    outbox: TrajectoryOutbox
    target_digest: str
    supervision: Supervision = "captured"
    sampling_rate: float = 1.0
    min_response_tokens: int = 8


class _Finished(NamedTuple):
    """A trajectory without features, and the blocks they are read from: they are the recorder's until it is done."""

    trajectory: Trajectory
    block_table: list[int]


class TrajectoryRecorder:
    """Decides which requests are captured, and hands their trajectories over from a thread of its own.

    Args:
        config: What is captured.
        features: With supervision `captured`, where the features are.
        blocks: Whose blocks are borrowed while features are read.
    """

    def __init__(self, config: CaptureConfig, features: FeaturePool | None, blocks: BlockManager) -> None:
        self.config, self.features = config, features
        self._blocks = blocks
        self._rng = random.Random()  # which requests are captured need not repeat
        self._finished: queue.SimpleQueue[_Finished | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._num_borrowed = 0
        self._thread = threading.Thread(target=self._run, name="trajectory-recorder", daemon=True)
        self._thread.start()

    def wants(self, request: Request) -> bool:
        """Decide whether a new request is captured."""
        return request.params.allow_training and self._rng.random() < self.config.sampling_rate

    def record(self, sample: Sample) -> bool:
        """Take a sample that has ended; True when its KV blocks are now the recorder's, to be given back later."""
        seq = sample.seq
        if sample.output.finish_reason == "error":
            return False  # its features are not finite
        if not seq.is_captured or seq.num_output_tokens < self.config.min_response_tokens:
            return False
        trajectory = Trajectory(
            request_id=seq.request.request_id,
            sample_index=seq.sample_index,
            token_ids=list(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            rounds=sample.rounds,
            drafter_version=seq.drafter_version,
            target_digest=self.config.target_digest,
            temperature=seq.request.params.temperature,
        )
        # The features of all tokens but the last are there, unless it was preempted and never ran again.
        has_blocks = self.features is not None and seq.num_computed >= seq.num_tokens - 1
        self._finished.put(_Finished(trajectory, seq.block_table if has_blocks else []))
        self._num_borrowed += has_blocks
        return has_blocks

    def give_back(self) -> None:
        """Release the blocks whose features have been read; waits for the others when blocks are scarce."""
        is_scarce = self._blocks.num_free < _SCARCE * self._blocks.num_blocks
        while self._num_borrowed:
            try:
                table = self._done.get(block=is_scarce)
            except queue.Empty:
                return
            self._blocks.release(table)
            self._num_borrowed -= 1

    def flush(self) -> None:
        """Wait until everything recorded has reached the outbox, and release every block."""
        while self._num_borrowed:
            self._blocks.release(self._done.get())
            self._num_borrowed -= 1

    def close(self) -> None:
        """Hand over what was recorded, and stop."""
        self.flush()
        self._finished.put(None)
        self._thread.join()

    # ---- the recorder's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            finished = self._finished.get()
            if finished is None:
                return
            try:
                self._hand_over(finished)
            except Exception:  # a trajectory is lost, serving is not to notice
                logger.exception("a trajectory is lost request_id=%s", finished.trajectory.request_id)
            finally:
                if finished.block_table:
                    self._done.put(finished.block_table)

    def _hand_over(self, finished: _Finished) -> None:
        trajectory = finished.trajectory
        if self.features is not None:
            block_size, num_rows = self._blocks.block_size, len(trajectory.token_ids) - 1
            read = self.features.read(finished.block_table, block_size, num_rows) if finished.block_table else None
            trajectory = replace(trajectory, features=read)
        self.config.outbox.put(trajectory)


def start_capture(config: CaptureConfig, runner: Runner, blocks: BlockManager) -> TrajectoryRecorder:
    """Make a runner keep features, if they are wanted, and return the recorder of its engine.

    Raises:
        ConfigError: There is no drafter to learn.
    """
    drafter = runner.drafter
    if drafter is None:
        raise ConfigError("trajectories are of use to a trainer of the drafter only: give --draft")
    if config.supervision == "captured":
        hidden_size = runner.target.config.hidden_size
        num_slots = blocks.num_blocks * blocks.block_size
        taps_size = len(drafter.tap_layer_ids) * hidden_size
        runner.features = FeaturePool(num_slots, taps_size, hidden_size, runner.target.dtype)
        logger.info(
            "features are captured bytes_per_token=%d most_bytes=%d",
            runner.features.num_bytes_per_token,
            runner.features.num_bytes_per_token * num_slots,
        )
    return TrajectoryRecorder(config, runner.features, blocks)
