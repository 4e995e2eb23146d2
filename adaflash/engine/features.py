# SPDX-License-Identifier: Apache-2.0
"""The target's features of captured tokens in host memory, indexed by KV slot.

So whatever happens to KV blocks (prefix cache hits, chunks, preemption, copies) happens to the features of their tokens
too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from adaflash.ops.metadata import PackedBatch
from adaflash.training.trajectories import TrajectoryFeatures


class FeaturePool:
    """Tap features and last hidden states of tokens in host memory, one row per KV slot.

    Memory is taken as rows are written, at most num_slots rows.

    Args:
        num_slots: Slots of the KV pool.
        taps_size: Features of the tapped layers together.
        hidden_size: Features of the last hidden state.
        dtype: As computed.
    """

    def __init__(self, num_slots: int, taps_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._taps_size = taps_size
        self._rows = torch.empty(num_slots, taps_size + hidden_size, dtype=dtype)
        self._is_written = np.zeros(num_slots, dtype=bool)

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes of one row."""
        return self._rows.shape[1] * self._rows.itemsize

    def write(self, batch: PackedBatch, taps: Tensor, hidden: Tensor, wanted: list[bool]) -> None:
        """Keep the features of a target forward.

        Args:
            batch: What ran.
            taps: [T, taps_size].
            hidden: [T, H] after the final norm.
            wanted: Of each sequence, whether its rows may be kept; rows of the others count as unknown.
        """
        slots = batch.slot_mapping.cpu()
        if all(wanted):
            self._store(slots, taps, hidden)
            self._is_written[slots.numpy()] = True
            return
        is_wanted = np.repeat(np.array(wanted), batch.query_lens_cpu)
        self._is_written[slots.numpy()] = is_wanted
        rows = torch.from_numpy(np.flatnonzero(is_wanted))
        if len(rows):
            on_device = rows.to(taps.device)
            self._store(slots[rows], taps[on_device], hidden[on_device])

    def _store(self, slots: Tensor, taps: Tensor, hidden: Tensor) -> None:
        self._rows[slots, : self._taps_size] = taps.cpu()
        self._rows[slots, self._taps_size :] = hidden.cpu()

    def copy_blocks(self, pairs: Iterable[tuple[int, int]], block_size: int) -> None:
        """Copy the rows of whole blocks, `(source, destination)`."""
        for source, destination in pairs:
            old = slice(source * block_size, (source + 1) * block_size)
            new = slice(destination * block_size, (destination + 1) * block_size)
            self._rows[new] = self._rows[old]
            self._is_written[new] = self._is_written[old]

    def read(self, block_table: list[int], block_size: int, num_tokens: int) -> TrajectoryFeatures | None:
        """Return the features of a sequence's first tokens; None when some of them are unknown."""
        blocks = torch.tensor(block_table)
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:num_tokens]
        if not self._is_written[slots.numpy()].all():
            return None
        rows = self._rows[slots].float().numpy()
        return TrajectoryFeatures(rows[:, : self._taps_size], rows[:, self._taps_size :])
