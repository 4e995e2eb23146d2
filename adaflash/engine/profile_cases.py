# SPDX-License-Identifier: Apache-2.0
"""Which steps a profile measures: kinds that tell the terms of the cost model apart, and fit the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from adaflash.cache.block_manager import BlockManager
from adaflash.errors import CapacityError
from adaflash.speculative.base import Drafter
from adaflash.speculative.cost_table import knots_up_to

# Context of a sequence, and the one that shows what a KV token costs.
_CONTEXT_LEN, _LONG_CONTEXT_LEN = 32, 1024


class Case(NamedTuple):
    """One kind of step to measure.

    Attributes:
        num_tokens: Packed tokens of the target forward, spread evenly; 0 for a draft alone.
        num_seqs: S.
        context_len: Computed tokens of each sequence.
        num_drafts: Drafts that each sequence makes first; 0 drafts nothing.
    """

    num_tokens: int
    num_seqs: int
    context_len: int
    num_drafts: int

    @property
    def num_draft_rows(self) -> int:
        """Rows of all draft blocks, anchors included; 0 without a draft."""
        return self.num_seqs * (self.num_drafts + 1) if self.num_drafts else 0


@dataclass(frozen=True)
class ProfileLimits:
    """What bounds the steps of an engine.

    Attributes:
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Most tokens in one target forward.
        max_model_len: Longest sequence.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def make_cases(
    drafter: Drafter | None, blocks: BlockManager, limits: ProfileLimits, row_multiple: int = 1
) -> list[list[Case]]:
    """Return the cases in groups, the most telling group first, each in increasing size.

    The first is the least that gives both tables a slope; the next two tell sizes (in steps of 4, then of 2, and both
    ends of the first steps of costs), sequences (few long ones, or one token each) and context apart; the last fills in
    sizes between. For `row_multiple` see `knots_up_to`.

    Raises:
        CapacityError: No KV block is free.
    """
    fit = _Fit(drafter, blocks, limits)
    width, max_seqs = fit.width, limits.max_num_seqs
    max_tokens = min(limits.max_num_batched_tokens, max_seqs * width)
    sizes = knots_up_to(max_tokens, row_multiple)
    ends = [size for size in sizes if size - 1 in sizes and (size - 1) % row_multiple == 0] if row_multiple > 1 else []
    powers = [size for size in knots_up_to(max_tokens) if size & (size - 1) == 0]
    wide = [size for size in powers[2::2] if size <= max_seqs]  # 4, 16, 64, ...
    longest = min(width, max_tokens)
    groups = (
        [fit.packed(1), fit.packed(longest), fit.draft(min(4, max_seqs))],
        [*map(fit.packed, powers[::2]), fit.packed(1, _LONG_CONTEXT_LEN), *(fit.case(n, n) for n in wide[:1])],
        [
            *map(fit.packed, sorted({*powers[1::2], *ends})),
            fit.packed(longest, _LONG_CONTEXT_LEN),
            *map(fit.draft, wide[1:]),
            *(fit.case(n, n) for n in wide[1:]),
            *(fit.case(n, 4 * n) for n in wide if width >= 4 and 4 * n <= max_tokens),
        ],
        [fit.packed(size) for size in sizes if size not in powers],
    )
    distinct = _distinct(groups)
    if not distinct[0]:
        raise CapacityError("no KV block is free to measure steps with: try again when fewer requests run")
    return distinct


class _Fit:
    """Makes cases that fit an engine's limits and its free blocks.

    Attributes:
        width: Most tokens of a sequence that decodes in one step: W, or 1 without a drafter.
    """

    def __init__(self, drafter: Drafter | None, blocks: BlockManager, limits: ProfileLimits) -> None:
        self._num_free, self._block_size = blocks.num_free, blocks.block_size
        self._max_model_len = limits.max_model_len
        self._draft_width = 0 if drafter is None else drafter.draft_block_size
        self._max_draft_len = 0 if drafter is None else drafter.max_position_embeddings
        self.width = max(1, min(self._draft_width, limits.max_model_len))

    def packed(self, num_tokens: int, context_len: int = _CONTEXT_LEN) -> Case | None:
        """Return the case with the fewest sequences."""
        return self.case(-(-num_tokens // self.width), num_tokens, context_len)

    def case(self, num_seqs: int, num_tokens: int, context_len: int = _CONTEXT_LEN) -> Case | None:
        """Return a case, with less context where that much does not fit; None when it does not fit at all.

        What verifies drafts has drafted them; a lone token drafts too if it can, which is the cheapest draft of all.
        """
        most = -(-num_tokens // num_seqs)  # of a sequence
        room = self._room(num_seqs, most, drafts=True)
        if (num_tokens > num_seqs or num_seqs == 1) and room >= 0:
            return Case(num_tokens, num_seqs, min(context_len, room), max(1, most - 1))
        room = self._room(num_seqs, 1, drafts=False)
        return Case(num_tokens, num_seqs, min(context_len, room), 0) if num_tokens == num_seqs and room >= 0 else None

    def draft(self, num_seqs: int) -> Case | None:
        """Return the case of a draft alone, None when it does not fit."""
        room = self._room(num_seqs, 1, drafts=True)
        return Case(0, num_seqs, min(_CONTEXT_LEN, room), self._draft_width - 1) if room >= 0 else None

    def _room(self, num_seqs: int, num_tokens: int, drafts: bool) -> int:
        """Return how much context each sequence may have beside `num_tokens` tokens; negative when they do not fit."""
        num_slots = max(num_tokens, self._draft_width) if drafts else num_tokens
        room = min(self._num_free // num_seqs * self._block_size - num_slots, self._max_model_len - num_tokens)
        if not drafts:
            return room
        return min(room, self._max_draft_len - self._draft_width) if self._draft_width else -1


def _distinct(groups: Iterable[list[Case | None]]) -> list[list[Case]]:
    """Return the groups in increasing size, without what does not fit and what an earlier group has."""
    found: set[Case] = set()
    distinct = []
    for group in groups:
        cases = {case for case in group if case is not None} - found
        found |= cases
        distinct.append(sorted(cases, key=lambda case: (case.num_tokens + case.num_seqs, case)))
    return distinct
