# SPDX-License-Identifier: Apache-2.0
"""Counters of a running engine; they only grow."""

from __future__ import annotations

from adaflash.cache.block_manager import BlockManager
from adaflash.engine.runner import StepTimes
from adaflash.engine.scheduler import Scheduler
from adaflash.request import EngineStats


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
        self._accepted_per_position = [0] * num_positions
        self._num_positions = num_positions
        self._total_s = 0.0
        self._times = StepTimes()

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt whose prefill is done."""
        self._num_prompt_tokens += num_tokens
        self._num_cached_tokens += num_cached

    def count_draft(self, num_verified: int, num_accepted: int) -> None:
        """Count one sequence's draft block."""
        self._num_drafts += 1
        self._num_drafted_tokens += self._num_positions
        self._num_verified_tokens += num_verified
        for position in range(num_accepted):
            self._accepted_per_position[position] += 1

    def end_step(self, elapsed_s: float, times: StepTimes) -> None:
        """Count one step; `times` accumulates over the engine's life."""
        self._num_steps += 1
        self._total_s += elapsed_s
        self._times = times

    def snapshot(self, scheduler: Scheduler, blocks: BlockManager) -> EngineStats:
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
            step_time_s={
                "draft": self._times.draft,
                "verify": self._times.verify,
                "host": self._total_s - self._times.draft - self._times.verify,
            },
        )
