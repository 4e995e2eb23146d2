# SPDX-License-Identifier: Apache-2.0
"""Token counts of the sequences that use penalties, on the device, grown on demand; nothing for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PenaltyState:
    """Slots of `PenaltyMetadata`: one row of counts per penalised sequence; truthy while any is held.

    Attributes:
        output_counts: [P, V] int32, occurrences in the committed output of the slot's sequence.
        prompt_mask: [P, V] bool, tokens present in its prompt.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._slots: dict[int, int] = {}
        self._free: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._slots)

    def acquire(self, seq_key: int, prompt_ids: Sequence[int]) -> int:
        """Return a cleared slot for the sequence, with its prompt marked."""
        assert seq_key not in self._slots, f"sequence {seq_key} already holds a penalty slot"
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[seq_key] = slot
        self.output_counts[slot].zero_()
        self.prompt_mask[slot].zero_()
        self.prompt_mask[slot, self._ids(prompt_ids)] = True
        return slot

    def count(self, seq_key: int, token_ids: Sequence[int]) -> None:
        """Add committed tokens to the sequence's counts; nothing for a sequence without penalties."""
        slot = self._slots.get(seq_key)
        if slot is not None and len(token_ids):
            ids = self._ids(token_ids)
            self.output_counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def release(self, seq_key: int) -> None:
        """Free the sequence's slot, if it has one."""
        slot = self._slots.pop(seq_key, None)
        if slot is not None:
            self._free.append(slot)
        if not self._slots:  # Give the memory of a burst back.
            self.output_counts = self.output_counts.new_zeros(0, self._vocab_size)
            self.prompt_mask = self.prompt_mask.new_zeros(0, self._vocab_size)
            self._free = []

    def _grow(self) -> None:
        size = self.output_counts.shape[0]
        added = max(size, 4)
        self.output_counts = torch.cat([self.output_counts, self.output_counts.new_zeros(added, self._vocab_size)])
        self.prompt_mask = torch.cat([self.prompt_mask, self.prompt_mask.new_zeros(added, self._vocab_size)])
        self._free.extend(range(size + added - 1, size - 1, -1))

    @property
    def _vocab_size(self) -> int:
        return self.output_counts.shape[1]

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.output_counts.device)
