# SPDX-License-Identifier: Apache-2.0
"""Lays sequences of different query lengths end to end into one `PackedBatch`."""

from __future__ import annotations

from itertools import chain
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from adaflash.ops.compiled import compiled
from adaflash.ops.host_batch import BatchLayout, HostBatch
from adaflash.ops.metadata import PackedBatch


class PackEntry(NamedTuple):
    """One sequence's query tokens.

    Attributes:
        token_ids: Tokens at positions start, start + 1, ...
        start: Position of the first one; everything before it is in the KV cache.
        block_table: Blocks that hold at least start + len(token_ids) slots.
        num_logits: How many of the last rows need logits.
    """

    token_ids: list[int]
    start: int
    block_table: list[int]
    num_logits: int


def pack(entries: list[PackEntry], block_size: int, device: torch.device) -> PackedBatch:
    """Pack `entries` in order; T = sum of their lengths, R = sum of their `num_logits`."""
    return lay_out(entries, block_size).on(device)


def lay_out(entries: list[PackEntry], block_size: int, table_width: int | None = None) -> HostBatch:
    """Pack `entries` on the host.

    Args:
        entries: In order.
        block_size: Slots of a block.
        table_width: Columns of the block tables; None for as many as the longest one needs.
    """
    query_lens = [len(entry.token_ids) for entry in entries]
    starts = [entry.start for entry in entries]
    num_logits = [entry.num_logits for entry in entries]
    tables = [entry.block_table for entry in entries]
    table_lens = list(map(len, tables))
    layout = BatchLayout(sum(query_lens), len(entries), sum(num_logits), table_width or max(table_lens))
    batch, arrays = HostBatch.empty(layout, query_lens, list(map(add, starts, query_lens)), tables)
    arrays.token_ids[:] = [t for entry in entries for t in entry.token_ids]
    _lay_out(
        np.array((query_lens, starts, num_logits, table_lens), dtype=np.int64),
        np.array(list(chain.from_iterable(tables)), dtype=np.int64),
        block_size,
        arrays.rows,
        arrays.logits_indices,
        arrays.lens,
        arrays.block_tables,
    )
    return batch


@compiled("void(int64[:, ::1], int64[::1], int64, int64[:, ::1], int64[::1], int32[::1], int32[:, ::1])")
def _lay_out(
    entries: npt.NDArray[np.int64],
    table_ids: npt.NDArray[np.int64],
    block_size: int,
    rows_: npt.NDArray[np.int64],
    logits_indices_: npt.NDArray[np.int64],
    lens_: npt.NDArray[np.int32],
    padded_tables_: npt.NDArray[np.int32],
) -> None:
    """Fill in a batch's arrays.

    Args:
        entries: [4, S] query lengths, starts, numbers of logits, lengths of the block tables.
        table_ids: All block tables end to end.
        block_size: Slots of a block.
        rows_: [2, T] positions and slots.
        logits_indices_: [R].
        lens_: [2 S + 1] `cu_seqlens_q`, then `seq_lens`.
        padded_tables_: [S, max_blocks] zeros.

    Raises:
        IndexError: An entry goes beyond its block table or is longer than the tables are wide, or it wants logits of
            more tokens than it has.
    """
    num_seqs = entries.shape[1]
    row, first_id, logit = 0, 0, 0
    lens_[0] = 0
    for s in range(num_seqs):
        query_len, start, num_logits, table_len = entries[0, s], entries[1, s], entries[2, s], entries[3, s]
        if start + query_len > table_len * block_size:
            raise IndexError("an entry goes beyond its block table")
        if table_len > padded_tables_.shape[1]:
            raise IndexError("a block table is wider than the batch's")
        if num_logits > query_len:
            raise IndexError("an entry wants logits of more tokens than it has")
        for i in range(table_len):
            padded_tables_[s, i] = table_ids[first_id + i]
        for position in range(start, start + query_len):
            rows_[0, row] = position
            rows_[1, row] = padded_tables_[s, position // block_size] * block_size + position % block_size
            row += 1
        for i in range(num_logits):
            logits_indices_[logit + i] = row - num_logits + i
        first_id, logit = first_id + table_len, logit + num_logits
        lens_[s + 1], lens_[num_seqs + 1 + s] = row, start + query_len
