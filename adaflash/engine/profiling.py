# SPDX-License-Identifier: Apache-2.0
"""Measures what steps cost: real draft and verify forwards of made-up sequences on an idle engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from adaflash.cache.block_manager import BlockManager
from adaflash.engine.profile_cases import Case, ProfileLimits, make_cases
from adaflash.engine.runner import Drafts, Round, Runner
from adaflash.engine.scheduler import ScheduledSequence
from adaflash.engine.sequence import ContextWrite, Sequence
from adaflash.request import Request, SamplingParams
from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.cost_table import CostSample

logger = logging.getLogger(__name__)

DEFAULT_BUDGET_S = 2.0
# A case that takes a larger share of the budget is measured once.
_MAX_REPEATED_SHARE = 0.15


@torch.inference_mode()
def profile(
    runner: Runner, blocks: BlockManager, limits: ProfileLimits, budget_s: float = DEFAULT_BUDGET_S
) -> CostModel:
    """Measure steps of increasing size and return their cost model; larger sizes are extrapolated.

    Call between two steps, best on an idle engine: sizes that need more blocks than are free are extrapolated too. The
    engine is as before afterwards: no block is held or registered (cached prefixes may have been evicted), and step
    times and sampling state are those of before. Drafts are the good version's.

    Args:
        runner: The models and their KV pools.
        blocks: Whose blocks the pools hold.
        limits: What the engine may pack.
        budget_s: Seconds to spend; the least that gives the tables a slope is measured whatever it takes.

    Raises:
        CapacityError: No KV block is free.
    """
    assert budget_s > 0, f"a profile takes a budget > 0, not {budget_s}"
    started = time.perf_counter()
    measuring = _Measuring(runner, blocks, budget_s)
    with _untouched_times(runner):
        groups = make_cases(runner.drafter, blocks, limits, runner.backend.row_multiple)
        measuring.start(groups[0])
        for count in range(1, len(groups)):
            measuring.measure(groups[count])
            for group in groups[: count + 1]:
                measuring.measure(group)
    verify, draft = measuring.samples()
    logger.info(
        "step costs profiled seconds=%.2f cases=%d max_tokens=%d max_draft_rows=%d",
        time.perf_counter() - started,
        len(verify),
        max(sample.size for sample in verify),
        max((sample.size for sample in draft), default=0),
    )
    max_draft_rows = limits.max_num_seqs * (1 if runner.drafter is None else runner.drafter.draft_block_size)
    return CostModel.from_samples(
        verify, draft, limits.max_num_batched_tokens, max_draft_rows, runner.backend.row_multiple
    )


class _Run(NamedTuple):
    """Seconds of the target forward and of the draft of a case; None for what it has not."""

    verify_s: float | None
    draft_s: float | None


class _Measuring:
    """Runs cases while the budget lasts, and keeps the fastest run of each: load and page-ins only ever add."""

    def __init__(self, runner: Runner, blocks: BlockManager, budget_s: float) -> None:
        self._runner = runner
        self._blocks = blocks
        self._budget_s = budget_s
        self._deadline = time.perf_counter() + budget_s
        self._runs: dict[Case, list[_Run]] = {}
        self._touched: set[int] = set()

    def start(self, cases: list[Case]) -> None:
        """Warm up with the first case, and run all of them whatever they take."""
        self._run(cases[0])
        self._runs = {case: [self._run(case)] for case in cases}

    def measure(self, group: list[Case]) -> None:
        """Run the cases of a group, leaving out what would exceed the budget, and dear ones that have run before."""
        for case in group:
            expected_s = self._expected_s(case)
            is_dear = case in self._runs and expected_s > _MAX_REPEATED_SHARE * self._budget_s
            if not is_dear and time.perf_counter() + expected_s <= self._deadline:
                self._runs.setdefault(case, []).append(self._run(case))

    def samples(self) -> tuple[list[CostSample], list[CostSample]]:
        """Return the samples of target and of draft forwards."""
        verify, draft = [], []
        for case, runs in self._runs.items():
            num_context = case.num_seqs * case.context_len
            verify_times = [run.verify_s for run in runs if run.verify_s is not None]
            draft_times = [run.draft_s for run in runs if run.draft_s is not None]
            if verify_times:
                verify.append(CostSample(case.num_tokens, case.num_seqs, num_context, min(verify_times)))
            if draft_times:
                draft.append(CostSample(case.num_draft_rows, 0, num_context, min(draft_times)))
        return verify, draft

    def _expected_s(self, case: Case) -> float:
        """Return what a case took, or its parts what the most similar ones took, more in proportion to the size."""
        if case in self._runs:
            return sum(seconds for seconds in self._runs[case][-1] if seconds is not None)
        verify, draft = self.samples()
        verify_s = _in_proportion(verify, case.num_tokens) if case.num_tokens else 0.0
        return verify_s + (_in_proportion(draft, case.num_draft_rows) if case.num_drafts else 0.0)

    def _run(self, case: Case) -> _Run:
        draft_s = verify_s = drafts = None
        with self._sequences(case) as items:
            if case.num_drafts:
                started = time.perf_counter()
                drafts = self._runner.draft(items, case.num_drafts)
                draft_s = time.perf_counter() - started
            if case.num_tokens:
                rounds = self._rounds(items, drafts)
                started = time.perf_counter()
                self._runner.verify(rounds, drafts)
                verify_s = time.perf_counter() - started
        return _Run(verify_s, draft_s)

    def _rounds(self, items: list[ScheduledSequence], drafts: Drafts | None) -> list[Round]:
        if drafts is None:
            when = ContextWrite.NEVER if self._runner.drafter is None else ContextWrite.NOW
            return [Round(item, [], None, when) for item in items]
        return [
            Round(item, drafts.token_ids[row][: item.max_drafts], row, ContextWrite.NOW)
            for row, item in enumerate(items)
        ]

    @contextmanager
    def _sequences(self, case: Case) -> Iterator[list[ScheduledSequence]]:
        """Make up the sequences of a case, which hold blocks and sampling state until the end."""
        items: list[ScheduledSequence] = []
        try:
            for index in range(case.num_seqs):
                num_tokens = case.num_tokens // case.num_seqs + (index < case.num_tokens % case.num_seqs)
                items.append(
                    ScheduledSequence(self._sequence(case, index, num_tokens), 1, True, max(0, num_tokens - 1))
                )
            self._touch([block for item in items for block in item.seq.block_table])
            yield items
        finally:
            for item in reversed(items):  # Backwards, so that the pool hands the blocks out in the same order again.
                self._blocks.release(item.seq.block_table)
                self._runner.sampling.remove(item.seq.key)

    def _sequence(self, case: Case, index: int, num_tokens: int) -> Sequence:
        """Return a greedy sequence whose anchor follows the computed context."""
        vocab_size = self._runner.target.config.vocab_size
        token_ids = [(37 * index + 11 * position) % vocab_size for position in range(case.context_len + 1)]
        request = Request("profile", token_ids, SamplingParams(temperature=0.0, max_tokens=None, seed=0))
        seq = Sequence(-1 - index, request, 0, num_tokens)  # The engine's keys are >= 0.
        drafter, num_slots = self._runner.drafter, 0
        if drafter is not None:
            seq.drafter_version = drafter.version
            num_slots = case.num_drafts + 1
        table = self._blocks.allocate(self._blocks.num_blocks_for(case.context_len + max(num_tokens, num_slots)))
        assert table is not None, "a case fits into the free blocks"
        seq.block_table = table
        seq.num_computed = case.context_len
        self._runner.sampling.add(seq.key, token_ids, request.params, 0, 0, ())
        return seq

    def _touch(self, used: list[int]) -> None:
        """Write blocks that were never written: unwritten memory is read faster than a KV cache is."""
        fresh = [block for block in used if block not in self._touched]
        self._runner.copy_blocks([(used[0], block) for block in fresh if block != used[0]])
        self._touched.update(fresh)


def _in_proportion(known: list[CostSample], size: int) -> float:
    nearest = min(known, key=lambda sample: abs(math.log(sample.size / size)))
    return nearest.seconds * max(1.0, size / nearest.size)


@contextmanager
def _untouched_times(runner: Runner) -> Iterator[None]:
    draft_s, verify_s = runner.times.draft, runner.times.verify
    try:
        yield
    finally:
        runner.times.draft, runner.times.verify = draft_s, verify_s
