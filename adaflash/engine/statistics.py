# SPDX-License-Identifier: Apache-2.0
"""Counters of a running engine and of its requests; they only grow."""

from __future__ import annotations

from typing import NamedTuple

from adaflash.cache.block_manager import BlockManager
from adaflash.engine.runner import StepTimes
from adaflash.engine.scheduler import Scheduler
from adaflash.request import EngineStats, SpeculationStats


class DraftCount(NamedTuple):
    """One sequence's draft block in a step.

    Attributes:
        version: What drafted.
        num_drafted: Drafts made.
        num_verified: Drafts the target saw.
        num_accepted: Drafts committed.
        expected: Drafts that were expected to be accepted, where the policy has an expectation, else 0.
    """

    version: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    expected: float


def count_round(stats_: SpeculationStats, num_emitted: int, draft: DraftCount | None, num_positions: int) -> None:
    """Count a decode round of a request, and its draft block if it drafted."""
    stats_.num_rounds += 1
    stats_.num_emitted_tokens += num_emitted
    if draft is None:
        return
    stats_.num_drafted_tokens += draft.num_drafted
    stats_.num_verified_tokens += draft.num_verified
    stats_.num_accepted_tokens += draft.num_accepted
    stats_.expected_accepted_tokens += draft.expected
    lens = list(stats_.verify_lens or (0,) * (num_positions + 1))
    lens[draft.num_verified] += 1
    stats_.verify_lens = tuple(lens)
    if draft.version not in stats_.drafter_versions:
        stats_.drafter_versions += (draft.version,)


class EngineCounters:
    """Counts what the engine did.

    Args:
        num_positions: K, draft positions per block.
    """

    def __init__(self, num_positions: int) -> None:
        self.num_output_tokens = 0
        self.num_finished = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_steps = 0
        self._num_drafts = 0
        self._num_drafted_tokens = 0
        self._num_verified_tokens = 0
        self._num_plain_steps = 0
        self._expected_accepted = 0.0
        self._accepted_per_position = [0] * num_positions
        self._verify_lens = [0] * (num_positions + 1)
        self._total_s = 0.0
        self._times = StepTimes()

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt whose prefill is done."""
        self._num_prompt_tokens += num_tokens
        self._num_cached_tokens += num_cached

    def count_draft(self, draft: DraftCount) -> None:
        """Count one sequence's draft block."""
        self._num_drafts += 1
        self._num_drafted_tokens += draft.num_drafted
        self._num_verified_tokens += draft.num_verified
        self._expected_accepted += draft.expected
        self._verify_lens[draft.num_verified] += 1
        for position in range(draft.num_accepted):
            self._accepted_per_position[position] += 1

    def end_step(self, elapsed_s: float, times: StepTimes, is_plain: bool) -> None:
        """Count one step; `times` accumulates over the engine's life."""
        self._num_steps += 1
        self._num_plain_steps += is_plain
        self._total_s += elapsed_s
        self._times = times

    def snapshot(self, scheduler: Scheduler, blocks: BlockManager, calibration_error: float) -> EngineStats:
        """Return the counters beside the current gauges."""
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=blocks.num_free,
            num_total_blocks=blocks.num_blocks,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_finished=self.num_finished,
            num_drafts=self._num_drafts,
            num_drafted_tokens=self._num_drafted_tokens,
            num_verified_tokens=self._num_verified_tokens,
            num_accepted_tokens=sum(self._accepted_per_position),
            num_accepted_per_position=tuple(self._accepted_per_position),
            num_plain_steps=self._num_plain_steps,
            verify_lens=tuple(self._verify_lens),
            expected_accepted_tokens=self._expected_accepted,
            calibration_error=calibration_error,
            step_time_s={
                "draft": self._times.draft,
                "verify": self._times.verify,
                "host": self._total_s - self._times.draft - self._times.verify,
            },
        )
