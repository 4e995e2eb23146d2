# SPDX-License-Identifier: Apache-2.0
"""Prompts are cut so that steps keep the latency limits of what they decode, and none of them starves."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.cache.block_manager import BlockManager
from adaflash.engine.prompt_room import PromptRoom
from adaflash.engine.scheduler import DraftLimits, Schedule, Scheduler
from adaflash.engine.sequence import ContextWrite, Sequence
from adaflash.request import Request, SamplingParams
from adaflash.speculative.allocation import FloatArray, IntArray

BLOCK_SIZE = 4
MAX_TOKENS = 64


class FakeCosts:
    """A step takes 1 ms per row, 2 ms per sequence and 0.01 ms per KV token; drafting is not asked for."""

    def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
        return 1e-3 * (num_tokens + 2.0 * num_seqs + 0.01 * num_context)

    def draft_s(self, *_: object) -> FloatArray:
        raise AssertionError("prompts are cut without asking what drafts cost")

    def step_s(self, plan: Schedule) -> float:
        """Return how long a plan's step takes without drafts."""
        rows = sum(item.num_tokens for item in plan.scheduled)
        context = sum(item.seq.num_computed for item in plan.scheduled)
        return float(self.verify_s(len(plan.scheduled), np.array([rows]), context)[0])


def scheduler_of(costs: FakeCosts | None, limits: DraftLimits | None = None) -> Scheduler:
    scheduler = Scheduler(BlockManager(400, BLOCK_SIZE, enable_prefix_caching=True), 8, MAX_TOKENS, limits)
    scheduler.costs = costs
    return scheduler


def sequence(key: int, num_prompt: int, limit_ms: float | None, max_tokens: int = 200) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, max_inter_token_ms=limit_ms)
    return Sequence(key, Request(f"r{key}", [key + 1] * num_prompt, params), 0, max_tokens)


def run(scheduler: Scheduler, plan: Schedule) -> None:
    for item in plan.scheduled:
        if item.samples:
            item.seq.append([7])
        scheduler.commit(item.seq, item.num_tokens, ContextWrite.NOW)


def decoding(scheduler: Scheduler, limits_ms: SequenceOf[float | None]) -> list[Sequence]:
    """Bring one sequence per limit, with a prompt of 4 tokens, to where it decodes."""
    seqs = [sequence(key, 4, limit) for key, limit in enumerate(limits_ms)]
    for seq in seqs:
        scheduler.add(seq)
    while not all(seq.is_decoding for seq in seqs):
        run(scheduler, scheduler.schedule())
    return seqs


def chunks(plan: Schedule) -> list[int]:
    """Return the sizes of the prompt chunks."""
    return [item.num_tokens for item in plan.scheduled if not item.seq.is_decoding]


def test_a_chunk_is_the_largest_that_keeps_the_limit() -> None:
    costs = FakeCosts()
    scheduler = scheduler_of(costs)
    [seq] = decoding(scheduler, [30.0])
    scheduler.add(sequence(10, 100, None))
    sizes = []
    for _ in range(4):
        plan = scheduler.schedule()
        sizes += chunks(plan)
        assert costs.step_s(plan) <= 30e-3
        assert costs.step_s(plan) + 1e-3 > 30e-3, "one more row would not have fitted"
        run(scheduler, plan)
    assert sizes == [24, 24, 24, 24], "30 ms less 1 row, 2 sequences and some context, in whole rows"
    assert seq.num_output_tokens == 5
    assert chunks(scheduler.schedule()) == [4], "what is left of the prompt"


@pytest.mark.parametrize(("limit", "costs"), [(None, FakeCosts()), (30.0, None)])
def test_without_a_limit_or_costs_nothing_is_cut(limit: float | None, costs: FakeCosts | None) -> None:
    scheduler = scheduler_of(costs)
    decoding(scheduler, [limit])
    scheduler.add(sequence(10, 100, None))
    assert chunks(scheduler.schedule()) == [MAX_TOKENS - 1]


def test_a_limit_of_a_request_that_does_not_decode_counts_for_nothing() -> None:
    scheduler = scheduler_of(FakeCosts())
    decoding(scheduler, [None])
    scheduler.add(sequence(10, 100, 1.0))
    assert chunks(scheduler.schedule()) == [MAX_TOKENS - 1]


def test_the_smallest_limit_counts() -> None:
    sizes = []
    for limits in ([40.0, None, 60.0], [60.0, 40.0, None], [40.0, 40.0, 40.0], [60.0, 60.0, None]):
        scheduler = scheduler_of(FakeCosts())
        decoding(scheduler, limits)
        scheduler.add(sequence(10, 100, None))
        sizes.append(chunks(scheduler.schedule())[0])
    assert sizes == [28, 28, 28, 48], "limit less 3 rows, 4 sequences and some context"


@pytest.mark.parametrize("limit", [0.001, 3.0, 5.5])
def test_prompts_do_not_starve_where_decoding_alone_takes_too_long(limit: float) -> None:
    scheduler = scheduler_of(FakeCosts())
    decoding(scheduler, [limit])
    prompts = [sequence(10, 10, None), sequence(11, 6, None)]
    for seq in prompts:
        scheduler.add(seq)
    sizes = []
    while not all(seq.num_output_tokens for seq in prompts):
        run(scheduler, plan := scheduler.schedule())
        sizes.append([item.num_tokens for item in plan.scheduled if item.seq in prompts and item.num_tokens > 1])
    assert sizes == [[4], [4], [2, 2], [4]], "a KV block of tokens a step, in the order of arrival"


def test_several_prompts_share_what_fits() -> None:
    costs = FakeCosts()
    scheduler = scheduler_of(costs)
    decoding(scheduler, [30.0])
    for key in (10, 11, 12):
        scheduler.add(sequence(key, 9, None))
    plan = scheduler.schedule()
    assert chunks(plan) == [9, 9, 2]
    assert costs.step_s(plan) <= 30e-3
    assert len(scheduler.waiting) == 0


def test_a_prompt_waits_when_reading_what_is_cached_of_it_takes_too_long() -> None:
    scheduler = scheduler_of(FakeCosts())
    first = sequence(10, 1001, None)
    scheduler.add(first)
    while not first.is_decoding:
        run(scheduler, scheduler.schedule())
    scheduler.remove(first)
    decoding(scheduler, [16.0])
    again = sequence(10, 1009, None)
    scheduler.add(sequence(11, 5, None))
    scheduler.add(again)
    plan = scheduler.schedule()
    assert [item.seq.key for item in plan.scheduled] == [0, 11]
    assert again.num_computed == 1000, "it has its blocks, and begins with the next step"
    run(scheduler, plan)
    scheduler.remove(plan.scheduled[1].seq)
    assert [item.num_tokens for item in scheduler.schedule().scheduled] == [1, 4]


def test_drafts_get_what_prompts_leave() -> None:
    scheduler = scheduler_of(FakeCosts(), DraftLimits(5, 4, 1000))
    seen: list[int] = []

    def select(_: list[Sequence], most: list[int], num_prefill: int) -> list[int]:
        seen.append(num_prefill)
        return [0] * len(most)

    decoding(scheduler, [30.0])
    scheduler.select = select
    scheduler.add(sequence(10, 100, None))
    plan = scheduler.schedule()
    assert seen == chunks(plan) == [24]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.1, 60.0) | st.none(), min_size=1, max_size=3),
    st.lists(st.integers(1, 120), min_size=1, max_size=5),
)
def test_every_step_keeps_the_limit_or_takes_one_block(limits: list[float | None], prompts: list[int]) -> None:
    costs = FakeCosts()
    scheduler = scheduler_of(costs)
    decoding(scheduler, limits)
    added = [sequence(10 + i, num_tokens, None) for i, num_tokens in enumerate(prompts)]
    for seq in added:
        scheduler.add(seq)
    limit_s = min((limit / 1e3 for limit in limits if limit is not None), default=math.inf)
    for _ in range(sum(prompts) + 1):
        plan = scheduler.schedule()
        num_prompt_tokens = sum(item.num_tokens for item in plan.scheduled if not item.seq.is_decoding)
        assert costs.step_s(plan) <= limit_s or num_prompt_tokens <= BLOCK_SIZE
        is_unfinished = any(not seq.num_output_tokens for seq in added)
        assert (num_prompt_tokens > 0) == is_unfinished, "some prompt goes on in each step"
        run(scheduler, plan)
        if not is_unfinished:
            return
    raise AssertionError("a prompt starves")


def test_costs_that_fall_with_size_allow_the_larger_chunk() -> None:
    class Jumping(FakeCosts):
        def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
            return np.where(num_tokens % 8 == 0, 1.0, 2.0) * np.where(num_tokens > 20, 10.0, 1.0)

    [seq] = decoding(scheduler_of(None), [1500.0])
    assert PromptRoom(Jumping(), [seq], BLOCK_SIZE).fit(0, 30) == 15, "16 rows with that of the anchor"
