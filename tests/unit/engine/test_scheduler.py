# SPDX-License-Identifier: Apache-2.0
"""Random host-only schedules: what is written is owned exclusively, nothing leaks, every request finishes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from adaflash.cache.block_manager import BlockManager
from adaflash.engine.scheduler import DraftLimits, Schedule, ScheduledSequence, Scheduler
from adaflash.engine.sequence import ContextWrite, Sequence
from adaflash.request import Request, SamplingParams
from adaflash.speculative.allocation import FloatArray, IntArray

WIDTH = 5


class _RowCosts:
    """A step takes a second per row, and half of one per KV token."""

    def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
        return num_tokens + 0.5 * num_context

    def draft_s(self, *_: object) -> FloatArray:
        raise AssertionError("the scheduler does not ask")


def _sequence(key: int, prompt: list[int], max_tokens: int, limit_s: float | None = None) -> Sequence:
    limit_ms = None if limit_s is None else 1000 * limit_s
    request = Request(f"r{key}", prompt, SamplingParams(max_tokens=max_tokens, max_inter_token_ms=limit_ms))
    return Sequence(key, request, 0, max_tokens)


@dataclass
class _World:
    """A scheduler, the sequences in it, and a model of what every KV slot holds, of the target and of the drafter."""

    rng: random.Random
    scheduler: Scheduler
    alive: dict[int, Sequence] = field(default_factory=dict)
    unforked: dict[int, list[Sequence]] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    drafter_slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def blocks(self) -> BlockManager:
        return self.scheduler.blocks

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def _slot(self, seq: Sequence, position: int) -> int:
        block_size = self.blocks.block_size
        return seq.block_table[position // block_size] * block_size + position % block_size

    def run(self, plan: Schedule) -> None:
        block_size = self.blocks.block_size
        destinations = [destination for _, destination in plan.copy_pairs]
        assert len(destinations) == len(set(destinations))
        for slots in (self.slots, self.drafter_slots):
            copies = {
                destination * block_size + i: slots.get(source * block_size + i)
                for source, destination in plan.copy_pairs
                for i in range(block_size)
            }
            slots.update({slot: value for slot, value in copies.items() if value is not None})
        self.seen["copied"] += len(plan.copy_pairs)
        self.seen["preempted"] += len(plan.preempted)
        self._check_writes(plan.scheduled)
        total = sum(item.num_tokens + item.max_drafts for item in plan.scheduled)
        assert total <= self.scheduler.max_num_batched_tokens
        if total < self.scheduler.max_num_batched_tokens:  # for a latency limit
            self.seen["kept waiting"] += len(self.scheduler.running) - len(plan.scheduled)
        assert len(plan.scheduled) <= self.scheduler.max_num_seqs
        for item in plan.scheduled:
            self._check_context(item.seq)
            if item.max_drafts:
                self._catch_up(item.seq)
                self._check_drafter_context(item.seq)
        for item in plan.scheduled:
            self._commit(item)

    def _check_writes(self, scheduled: list[ScheduledSequence]) -> None:
        """Every slot of this step, lookahead included, belongs to one sequence and to no cached block."""
        written: Counter[int] = Counter()
        for item in scheduled:
            start = item.seq.num_computed
            end = start + (WIDTH if item.max_drafts else item.num_tokens)
            assert end <= len(item.seq.block_table) * self.blocks.block_size
            for position in range(start, end):
                block = item.seq.block_table[position // self.blocks.block_size]
                assert self.blocks.is_writable(block), "written blocks are private and not cached"
                written[self._slot(item.seq, position)] += 1
            if item.max_drafts:
                self.seen["drafted"] += 1
                assert item.max_drafts < WIDTH
                assert item.max_drafts < item.seq.max_output_tokens - item.seq.num_output_tokens
        assert all(count == 1 for count in written.values()), "two sequences write the same slot"

    def _check_context(self, seq: Sequence) -> None:
        """The slots before `num_computed` hold exactly this sequence's prefix."""
        for position in range(seq.num_computed):
            assert self.slots[self._slot(seq, position)] == tuple(seq.token_ids[: position + 1])

    def _catch_up(self, seq: Sequence) -> None:
        self.seen["caught up"] += seq.num_pending > 0
        for position in range(seq.num_computed - seq.num_pending, seq.num_computed):
            assert self.blocks.is_writable(seq.block_table[position // self.blocks.block_size])
            self.drafter_slots[self._slot(seq, position)] = tuple(seq.token_ids[: position + 1])
        self.scheduler.catch_up(seq)

    def _check_drafter_context(self, seq: Sequence) -> None:
        for position in range(seq.num_computed):
            assert self.drafter_slots[self._slot(seq, position)] == tuple(seq.token_ids[: position + 1])

    def _context(self, item: ScheduledSequence) -> ContextWrite:
        seq = item.seq
        if self.scheduler.limits is None or not seq.has_drafter_kv:
            return ContextWrite.NEVER
        is_plain = self.scheduler.select is not None and item.max_drafts == 0 and seq.is_decoding
        return ContextWrite.LATER if is_plain or seq.num_pending else ContextWrite.NOW

    def _commit(self, item: ScheduledSequence) -> None:
        seq, rng, context, first = item.seq, self.rng, self._context(item), item.seq.num_computed
        # A block draft scribbles over all lookahead slots before the target writes its rows.
        for position in range(seq.num_computed, seq.num_computed + (WIDTH if item.max_drafts else 0)):
            self.slots[self._slot(seq, position)] = (-1,)
            self.drafter_slots[self._slot(seq, position)] = (-1,)
        tokens = seq.token_ids[: seq.num_computed + item.num_tokens]
        for position in range(seq.num_computed, len(tokens)):
            self.slots[self._slot(seq, position)] = tuple(tokens[: position + 1])
        if not item.samples:
            self._write_drafter_rows(seq, first, first + item.num_tokens, context)
            self.scheduler.commit(seq, item.num_tokens, context)
            return
        verified = rng.randint(0, item.max_drafts)
        accepted = rng.randint(0, verified)
        was_decoding = seq.is_decoding
        start = len(seq.token_ids)
        for k in range(verified):  # Rejected rows hold the rejected draft's KV.
            value = (rng.randrange(3) if k < accepted else -2,)
            self.slots[self._slot(seq, start + k)] = (*tuple(seq.token_ids), *value) if k < accepted else (-2,)
            if k < accepted:
                seq.append([value[0]])
        seq.append([rng.randrange(3)])
        emitted = len(seq.token_ids) - start
        finished = seq.num_output_tokens >= seq.max_output_tokens or rng.random() < 0.05
        num_new = emitted if was_decoding else item.num_tokens
        self._write_drafter_rows(seq, first, first + num_new, context)
        self.scheduler.commit(seq, num_new, context)
        children = self.unforked.pop(seq.key, [])
        if children:
            self.scheduler.fork(seq, children)
            self.alive.update({child.key: child for child in children})
            self.seen["forked"] += len(children)
        if finished:
            self.finish(seq)

    def _write_drafter_rows(self, seq: Sequence, first: int, end: int, context: ContextWrite) -> None:
        if context is ContextWrite.NOW:
            for position in range(first, end):
                self.drafter_slots[self._slot(seq, position)] = tuple(seq.token_ids[: position + 1])

    def switch(self, limits: DraftLimits | None) -> None:
        """Switch the verify policy."""
        self.scheduler.limits = limits
        if limits is None:
            for seq in self.scheduler.running:
                self.scheduler.give_up_pending(seq)

    def finish(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        del self.alive[seq.key]
        self.unforked.pop(seq.key, None)

    def check_references(self) -> None:
        held = Counter(block for seq in self.alive.values() for block in seq.block_table)
        assert all(self.blocks.ref_count(block) == held[block] for block in range(self.blocks.num_blocks))
        assert self.blocks.num_free == self.blocks.num_blocks - len(held)


def _world(rng: random.Random) -> _World:
    block_size = rng.choice([1, 2, 3, 4])
    max_len = 24
    num_blocks = -(-max_len // block_size) + rng.choice([0, 1, 3, 20])
    blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=rng.random() < 0.8)
    limits = DraftLimits(WIDTH, rng.randint(1, WIDTH - 1), rng.choice([12, 1000])) if rng.random() < 0.8 else None
    max_num_seqs = rng.randint(1, 6)
    return _World(rng, Scheduler(blocks, max_num_seqs, max_num_seqs + rng.randint(0, 12), limits))


def _run_schedule(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    world = _world(rng)
    limits, is_selective = world.scheduler.limits, rng.random() < 0.5
    if is_selective:
        world.scheduler.select = lambda _, most, __: [count if rng.random() < 0.3 else 0 for count in most]
    world.scheduler.costs = _RowCosts() if rng.random() < 0.8 else None
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 14))] for _ in range(3)]
    todo, key = rng.randint(2, 6), 0
    for _ in range(400):
        if todo and rng.random() < 0.4:
            prompt = list(rng.choice(prompts))[: rng.randint(1, 14)]
            limit_s = rng.uniform(1.0, 6.0) if rng.random() < 0.8 else None
            seq = _sequence(key, prompt, rng.randint(1, 24 - len(prompt)), limit_s)
            children = [_sequence(key + i, prompt, seq.max_output_tokens) for i in range(1, rng.choice([1, 1, 2, 4]))]
            world.alive[key] = seq
            if children:
                world.unforked[key] = children
            world.scheduler.add(seq)
            key, todo = key + 1 + len(children), todo - 1
        if world.alive and rng.random() < 0.03:
            world.finish(rng.choice(list(world.alive.values())))  # Abort.
            world.seen["aborted"] += 1
        if limits is not None and rng.random() < 0.05:  # The verify policy is switched.
            world.switch(rng.choice([limits, None]))
        if is_selective:
            world.scheduler.takes_bare_prefixes = rng.random() < 0.5
        plan = world.scheduler.schedule()
        assert plan.scheduled or plan.preempted or not world.has_work, "work waits, but nothing runs"
        world.run(plan)
        world.check_references()
        if not todo and not world.has_work:
            break
    assert not world.has_work, "every request finishes"
    assert world.blocks.num_free == world.blocks.num_blocks
    return world.seen


@pytest.mark.parametrize("chunk", range(10))
def test_random_schedules_write_only_exclusive_slots_and_leak_nothing(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(chunk * 1000, (chunk + 1) * 1000):
        try:
            seen += _run_schedule(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert all(
        seen[what] > 100
        for what in ("drafted", "caught up", "copied", "preempted", "forked", "aborted", "kept waiting")
    ), seen
