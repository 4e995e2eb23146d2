# SPDX-License-Identifier: Apache-2.0
"""Which sequences run in a step, with how many tokens and which KV blocks. Host only, knows no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from adaflash.cache.block_manager import MIXED_CONTEXT, BlockManager
from adaflash.engine.prompt_room import PromptRoom
from adaflash.engine.sequence import ContextWrite, Sequence
from adaflash.speculative.cost_model import StepCosts
from adaflash.speculative.forecast import LengthForecast

# (decoding sequences, most drafts of each, rows left for prefill) -> most drafts of each, 0 for those not to draft.
DraftSelector = Callable[[list[Sequence], list[int], int], list[int]]

# When cached prefixes without drafter rows are taken too, every so-manieth request still computes its own, so that
# somebody can draft.
_OWN_CONTEXT_INTERVAL = 8


@dataclass(frozen=True)
class DraftLimits:
    """What the drafter and the policy allow.

    Attributes:
        draft_block_size: W; a drafting sequence reserves so many slots from its anchor on.
        max_drafts: Most drafts to verify, <= W - 1.
        max_position_embeddings: A draft block must end at or before this position.
    """

    draft_block_size: int
    max_drafts: int
    max_position_embeddings: int


class ScheduledSequence(NamedTuple):
    """A sequence's share of one step.

    Attributes:
        seq: The sequence.
        num_tokens: Committed tokens to compute: a prefill chunk, or 1 for the anchor.
        samples: Whether the chunk reaches the last token, so that the step decides the next one.
        max_drafts: Most drafts it may verify; > 0 means W lookahead slots are reserved and it drafts.
    """

    seq: Sequence
    num_tokens: int
    samples: bool
    max_drafts: int


@dataclass
class Schedule:
    """One step's work.

    Attributes:
        scheduled: Decoding sequences first, then prefill chunks.
        copy_pairs: KV blocks to copy, `(source, destination)`, before anything is written.
        preempted: Sequences that gave up their KV and wait again.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copy_pairs: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """First come, first served, with chunked prefill beside decoding and preemption by recompute.

    Every decoding sequence gets the slot of its anchor first, at the price of preempting the youngest; lookahead slots
    for drafts come from what is left, so speculation never preempts what plain decoding would not.

    Args:
        blocks: The KV pool.
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Most tokens in one target forward, drafts included; >= max_num_seqs.
        limits: None switches drafting off.

    Attributes:
        select: Decides which sequences draft; None lets all of them that can.
        forecast: Tokens that running sequences will take; new ones are admitted beside that.
        takes_bare_prefixes: Whether a request takes cached tokens without rows of its drafter's context, and so never
            drafts, rather than compute them again.
        costs: Seconds of steps; prompts are cut so that steps keep the limits of what they decode. None cuts nothing.
    """

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, limits: DraftLimits | None
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every running sequence must fit into one step"
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.limits = limits
        self.select: DraftSelector | None = None
        self.forecast = LengthForecast(1 if limits is None else limits.draft_block_size)
        self.takes_bare_prefixes = False
        self.costs: StepCosts | None = None
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._num_started = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)

    def fork(self, parent: Sequence, children: Iterable[Sequence]) -> None:
        """Start further samples of a prompt whose prefill just ended: they share its blocks and run its last token.

        Children beyond `max_num_seqs` wait at the front of the queue and find the prompt in the prefix cache.
        """
        assert parent.num_computed == parent.num_prompt_tokens, "the parent's prefill just ended"
        late = []
        for child in children:
            if len(self.running) >= self.max_num_seqs:
                late.append(child)
                continue
            child.block_table = list(parent.block_table)
            self.blocks.share(child.block_table)
            child.num_computed = parent.num_prompt_tokens - 1
            child.has_drafter_kv, child.is_context_pure = parent.has_drafter_kv, parent.is_context_pure
            child.drafter_version, child.context_id = parent.drafter_version, parent.context_id
            child.context_start = parent.context_start
            child.num_registered, child.last_uid = parent.num_registered, parent.last_uid
            self.running.append(child)
        self.waiting.extendleft(reversed(late))

    def remove(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out and free its blocks."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.give_up_pending(seq)
        self._release(seq)

    def schedule(self) -> Schedule:
        """Plan one step: decode, then running prefills, then admissions."""
        plan = Schedule()
        decoding = self._reserve_anchors(plan)
        room = PromptRoom(self.costs, decoding, self.blocks.block_size)
        budget = self._schedule_decodes(decoding, plan, room)
        budget = self._continue_prefills(plan, budget, room)
        if not plan.preempted:
            self._admit(plan, budget, room)
        return plan

    def commit(self, seq: Sequence, num_new: int, context: ContextWrite) -> None:
        """Count `num_new` more tokens as computed, cache full blocks, and free the slots beyond.

        Args:
            seq: A sequence of the last schedule; its committed tokens are already appended.
            num_new: Rows of the step whose tokens are committed.
            context: What became of the drafter's KV for the same rows.
        """
        block_size = self.blocks.block_size
        seq.num_computed += num_new
        if context is ContextWrite.LATER and seq.has_drafter_kv:
            seq.num_pending += num_new
        else:
            assert not seq.num_pending, "what is pending is written before anything behind it"
            seq.has_drafter_kv = seq.has_drafter_kv and context is ContextWrite.NOW
        self._register_full(seq)
        num_blocks = -(-seq.num_computed // block_size)
        if len(seq.block_table) > num_blocks and seq.is_decoding:
            self.blocks.release(seq.block_table[num_blocks:])
            del seq.block_table[num_blocks:]

    def catch_up(self, seq: Sequence) -> None:
        """Count the pending rows of a sequence as written."""
        seq.num_pending = 0
        self._register_full(seq)

    def give_up_pending(self, seq: Sequence) -> None:
        """Offer what was computed to the prefix cache without the drafter rows that are missing."""
        if seq.num_pending and seq.block_table:
            seq.num_pending, seq.has_drafter_kv = 0, False
            self._register_full(seq)

    # ---- parts of schedule() ---------------------------------------------------------------------------------

    def _reserve_anchors(self, plan: Schedule) -> list[Sequence]:
        decoding: list[Sequence] = []
        i = 0
        while i < len(self.running):
            seq = self.running[i]
            if seq.is_decoding:
                if not self._reserve_or_preempt(seq, plan):
                    break
                decoding.append(seq)
            i += 1
        return decoding

    def _reserve_or_preempt(self, seq: Sequence, plan: Schedule) -> bool:
        while not self._reserve(seq, seq.num_computed + 1, plan):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _schedule_decodes(self, decoding: list[Sequence], plan: Schedule, room: PromptRoom) -> int:
        budget = self.max_num_batched_tokens - len(decoding)
        limits = self.limits
        most = [0 if limits is None else min(_max_drafts(seq, limits), budget) for seq in decoding]
        if self.select is not None and any(most):
            most = self.select(decoding, most, room.fit(0, self._num_prefill_tokens(budget)))
        for seq, drafts in zip(decoding, most, strict=True):
            drafts = min(drafts, budget)
            if limits is not None and drafts > 0:
                if not self._reserve(seq, seq.num_computed + limits.draft_block_size, plan):
                    drafts = 0
                budget -= drafts
            plan.scheduled.append(ScheduledSequence(seq, 1, True, drafts))
        return budget

    def _num_prefill_tokens(self, budget: int) -> int:
        """Return how many rows prefills will take at most, before they are planned."""
        count = sum(seq.num_uncomputed for seq in self.running if not seq.is_decoding)
        for seq, _ in zip(self.waiting, range(self.max_num_seqs - len(self.running)), strict=False):
            count += seq.num_tokens
        return min(count, budget)

    def _continue_prefills(self, plan: Schedule, budget: int, room: PromptRoom) -> int:
        for seq in [s for s in self.running if not s.is_decoding]:
            num_tokens = room.fit(seq.num_computed, min(seq.num_uncomputed, budget))
            if num_tokens == 0:
                break
            if not self._reserve(seq, seq.num_computed + num_tokens, plan):
                self._preempt(seq, plan)
                continue
            budget -= self._schedule_chunk(seq, num_tokens, plan, room)
        return budget

    def _admit(self, plan: Schedule, budget: int, room: PromptRoom) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs and room.fit(0, budget) > 0:
            seq = self.waiting[0]
            if not self._start(seq, plan):
                break
            self.waiting.popleft()
            self.running.append(seq)
            num_tokens = room.fit(seq.num_computed, min(seq.num_uncomputed, budget))
            if num_tokens == 0:  # reading what is cached of it takes too long beside the rest of this step
                break
            budget -= self._schedule_chunk(seq, num_tokens, plan, room)

    def _schedule_chunk(self, seq: Sequence, num_tokens: int, plan: Schedule, room: PromptRoom) -> int:
        room.take(seq.num_computed, num_tokens)
        plan.scheduled.append(ScheduledSequence(seq, num_tokens, num_tokens == seq.num_uncomputed, 0))
        return num_tokens

    def _start(self, seq: Sequence, plan: Schedule) -> bool:
        """Give `seq` blocks for all its tokens, from the prefix cache where possible; False when there are too few."""
        self._num_started += 1
        is_bare_welcome = self.takes_bare_prefixes and self._num_started % _OWN_CONTEXT_INTERVAL != 0
        needs_rows = self.limits is not None and not is_bare_welcome
        # Rows that other weights wrote are worth no more than none (ADR 8).
        matched, uid = self.blocks.match_prefix(seq.token_ids, seq.context_id if needs_rows else None)
        needed = self.blocks.num_blocks_for(seq.num_tokens)
        written_by = {self.blocks.context_id(block) for block in matched}
        seq.has_drafter_kv = written_by <= {seq.context_id}
        seq.block_table = list(matched)
        self.blocks.share(matched)
        # What runs will need blocks soon: admitting into the last ones would only preempt again.
        soon = len(self.running) * self.blocks.num_blocks_for(self.forecast.tokens_per_seq)
        fits = self.blocks.num_free >= needed - len(matched) + soon
        fresh = self.blocks.allocate(needed - len(matched), after=matched[-1] if matched else None) if fits else None
        if fresh is None:
            self._release(seq)
            return False
        seq.block_table += fresh
        seq.num_registered, seq.last_uid = len(matched), uid
        seq.num_computed = len(matched) * self.blocks.block_size
        if seq.num_computed == seq.num_tokens and not self._reopen_last_block(seq, plan):
            self._release(seq)
            return False
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed
        return True

    def _reopen_last_block(self, seq: Sequence, plan: Schedule) -> bool:
        """Make the last token of a fully cached prompt computable: its logits are needed, its block is shared."""
        pairs = self.blocks.make_writable(seq.block_table, len(seq.block_table) - 1)
        if pairs is not None:
            plan.copy_pairs += pairs
            seq.num_computed -= 1
            return True
        # No block for a copy: give the cached one back and recompute its tokens, in that very block if need be.
        self.blocks.release([seq.block_table.pop()])
        fresh = self.blocks.allocate(1)
        if fresh is None:
            return False
        seq.block_table += fresh
        seq.num_registered -= 1
        seq.num_computed -= self.blocks.block_size
        kept = seq.token_ids[: seq.num_computed]
        seq.last_uid = self.blocks.match_prefix(kept).last_uid
        return True

    # ---- blocks ----------------------------------------------------------------------------------------------

    def _reserve(self, seq: Sequence, num_tokens: int, plan: Schedule) -> bool:
        """Make slots [num_computed, num_tokens) exist and be exclusively `seq`'s; False (nothing kept) if it can't."""
        table, block_size = seq.block_table, self.blocks.block_size
        first = seq.num_computed // block_size
        if not self.blocks.are_writable(table, first):
            pairs = self.blocks.make_writable(table, first)
            if pairs is None:
                return False
            plan.copy_pairs += pairs
        missing = -(-num_tokens // block_size) - len(table)
        if missing > 0:
            fresh = self.blocks.allocate(missing, after=seq.block_table[-1] if seq.block_table else None)
            if fresh is None:
                return False
            seq.block_table += fresh
        return True

    def _register_full(self, seq: Sequence) -> None:
        """Offer full blocks to the prefix cache, once their drafter rows are written, or will never be."""
        block_size = self.blocks.block_size
        if seq.num_pending:
            return
        while (seq.num_registered + 1) * block_size <= seq.num_computed:
            start = seq.num_registered * block_size
            tokens = tuple(seq.token_ids[start : start + block_size])
            block = seq.block_table[seq.num_registered]
            context_id = seq.context_id if start >= seq.context_start else MIXED_CONTEXT
            seq.last_uid = self.blocks.register(block, seq.last_uid, tokens, context_id if seq.has_drafter_kv else None)
            seq.num_registered += 1

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq.block_table)
        seq.block_table = []
        seq.num_computed = 0
        seq.num_registered, seq.last_uid = 0, 0
        seq.has_drafter_kv = seq.is_context_pure = True
        seq.context_start, seq.num_pending = 0, 0

    def _preempt(self, seq: Sequence, plan: Schedule) -> None:
        self.running.remove(seq)
        lost = set(seq.block_table)
        plan.copy_pairs = [pair for pair in plan.copy_pairs if pair[1] not in lost]
        self.give_up_pending(seq)
        self._release(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)
        plan.preempted.append(seq)


def _max_drafts(seq: Sequence, limits: DraftLimits) -> int:
    if not seq.has_drafter_kv or seq.num_computed + limits.draft_block_size > limits.max_position_embeddings:
        return 0
    return max(0, min(limits.max_drafts, seq.max_output_tokens - seq.num_output_tokens - 1))
