# SPDX-License-Identifier: Apache-2.0
"""Lays sequences of different query lengths end to end into one `PackedBatch`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    query_lens = [len(entry.token_ids) for entry in entries]
    seq_lens = [entry.start + query_len for entry, query_len in zip(entries, query_lens, strict=True)]
    lens = np.array(query_lens, dtype=np.int64)
    cu_seqlens = np.zeros(len(entries) + 1, dtype=np.int32)
    np.cumsum(lens, out=cu_seqlens[1:])
    seq_index = np.repeat(np.arange(len(entries)), lens)
    first_positions = np.array([entry.start for entry in entries], dtype=np.int64) - cu_seqlens[:-1]
    positions = np.arange(cu_seqlens[-1], dtype=np.int64) + first_positions[seq_index]
    blocks, offsets = np.divmod(positions, block_size)
    tables = _pad_tables([entry.block_table for entry in entries])
    slots = tables[seq_index, blocks].astype(np.int64) * block_size + offsets
    token_ids = np.array([t for entry in entries for t in entry.token_ids], dtype=np.int64)

    def put(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return PackedBatch(
        token_ids=put(token_ids),
        positions=put(positions),
        slot_mapping=put(slots),
        cu_seqlens_q=put(cu_seqlens),
        seq_lens=put(np.array(seq_lens, dtype=np.int32)),
        block_tables=put(tables),
        logits_indices=put(_logits_rows(entries, cu_seqlens)),
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
        block_tables_cpu=[entry.block_table for entry in entries],
    )


def _pad_tables(tables: list[list[int]]) -> npt.NDArray[np.int32]:
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _logits_rows(entries: list[PackEntry], cu_seqlens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    counts = np.array([entry.num_logits for entry in entries], dtype=np.int64)
    ends = np.cumsum(counts)
    first_rows = cu_seqlens[1:] - counts
    rows: npt.NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(first_rows - (ends - counts), counts)
    return rows
