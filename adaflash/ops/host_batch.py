# SPDX-License-Identifier: Apache-2.0
"""A packed batch in one piece of host memory, so that one copy brings it to a device, or to where a graph reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adaflash.ops.metadata import PackedBatch, device_tensor


class BatchLayout(NamedTuple):
    """Sizes that decide where a batch's arrays lie in its buffer.

    Attributes:
        num_tokens: T.
        num_seqs: S.
        num_logits: R.
        table_width: Columns of the block tables.
    """

    num_tokens: int
    num_seqs: int
    num_logits: int
    table_width: int

    @property
    def num_wide(self) -> int:
        """Number of int64 values, which come first."""
        return 3 * self.num_tokens + self.num_logits

    @property
    def num_narrow(self) -> int:
        """Number of int32 values."""
        return 2 * self.num_seqs + 1 + self.num_seqs * self.table_width

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return 8 * self.num_wide + 4 * self.num_narrow


class HostArrays(NamedTuple):
    """Views of a batch's buffer, to be filled in.

    Attributes:
        token_ids: [T] int64.
        rows: [2, T] int64, positions and slots.
        logits_indices: [R] int64.
        lens: [2 S + 1] int32, `cu_seqlens_q`, then `seq_lens`.
        block_tables: [S, table_width] int32.
    """

    token_ids: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    logits_indices: npt.NDArray[np.int64]
    lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]


@dataclass(frozen=True)
class HostBatch:
    """What `PackedBatch` holds, still on the host.

    Attributes:
        layout: Sizes.
        buffer: [layout.num_bytes] uint8.
        query_lens: Query length of each sequence.
        seq_lens: KV length of each sequence including this step's tokens.
        block_tables: Block tables, unpadded.
    """

    layout: BatchLayout
    buffer: npt.NDArray[np.uint8]
    query_lens: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]

    @staticmethod
    def empty(
        layout: BatchLayout, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> tuple[HostBatch, HostArrays]:
        """Return a batch of these lengths, and its arrays, which are zero so far."""
        buffer = np.zeros(layout.num_bytes, dtype=np.uint8)
        num_tokens, num_wide, num_lens = layout.num_tokens, layout.num_wide, 2 * layout.num_seqs + 1
        wide, narrow = buffer[: 8 * num_wide].view(np.int64), buffer[8 * num_wide :].view(np.int32)
        arrays = HostArrays(
            wide[:num_tokens],
            wide[num_tokens : 3 * num_tokens].reshape(2, num_tokens),
            wide[3 * num_tokens :],
            narrow[:num_lens],
            narrow[num_lens:].reshape(layout.num_seqs, layout.table_width),
        )
        return HostBatch(layout, buffer, query_lens, seq_lens, block_tables), arrays

    def on(self, device: torch.device) -> PackedBatch:
        """Return the batch on `device`; on the CPU its tensors share this buffer."""
        return self.over(device_tensor(self.buffer, device))

    def over(self, buffer: Tensor) -> PackedBatch:
        """Return the batch with tensors that are views of `buffer`, which holds the same bytes on some device."""
        num_tokens, num_seqs, num_logits, table_width = self.layout
        num_wide_bytes = 8 * self.layout.num_wide
        wide, narrow = buffer[:num_wide_bytes].view(torch.int64), buffer[num_wide_bytes:].view(torch.int32)
        token_ids, positions, slots, logits = wide.split_with_sizes([num_tokens, num_tokens, num_tokens, num_logits])
        starts, seq_lens, tables = narrow.split_with_sizes([num_seqs + 1, num_seqs, num_seqs * table_width])
        return PackedBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=starts,
            seq_lens=seq_lens,
            block_tables=tables.view(num_seqs, table_width),
            logits_indices=logits,
            query_lens_cpu=self.query_lens,
            seq_lens_cpu=self.seq_lens,
            block_tables_cpu=self.block_tables,
        )


class StaticBatch:
    """A batch whose tensors stay where they are while their values change: what a captured forward reads.

    Args:
        example: The first values.
        device: Where the tensors live.

    Attributes:
        batch: The current values; its lists on the host are replaced by `load`, its tensors never.
    """

    def __init__(self, example: HostBatch, device: torch.device) -> None:
        self.layout = example.layout
        self._buffer = torch.empty(example.layout.num_bytes, dtype=torch.uint8, device=device)
        self.batch = example.over(self._buffer)
        self.load(example)

    def load(self, batch: HostBatch) -> None:
        """Take the values of a batch of the same layout, in one copy."""
        assert batch.layout == self.layout, "a captured forward takes batches of one layout"
        self._buffer.copy_(device_tensor(batch.buffer, self._buffer.device), non_blocking=True)
        self.batch = replace(
            self.batch,
            query_lens_cpu=batch.query_lens,
            seq_lens_cpu=batch.seq_lens,
            block_tables_cpu=batch.block_tables,
        )
