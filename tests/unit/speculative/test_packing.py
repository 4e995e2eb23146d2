# SPDX-License-Identifier: Apache-2.0
"""Packing lays sequences end to end: every row keeps its token, position, slot and place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.speculative.packing import PackEntry, pack

BLOCK_SIZE = 4


@st.composite
def _entries(draw: st.DrawFn) -> list[PackEntry]:
    entries = []
    for _ in range(draw(st.integers(1, 6))):
        start, length = draw(st.integers(0, 20)), draw(st.integers(1, 12))
        num_blocks = -(-(start + length) // BLOCK_SIZE) + draw(st.integers(0, 2))
        table = draw(st.lists(st.integers(0, 99), min_size=num_blocks, max_size=num_blocks))
        tokens = draw(st.lists(st.integers(0, 1000), min_size=length, max_size=length))
        entries.append(PackEntry(tokens, start, table, draw(st.integers(0, length))))
    return entries


@given(entries=_entries())
@settings(max_examples=200, deadline=None)
def test_every_row_keeps_its_token_position_and_slot(entries: list[PackEntry]) -> None:
    batch = pack(entries, BLOCK_SIZE, torch.device("cpu"))
    expected, logits_rows = [], []
    for entry in entries:
        for i, token in enumerate(entry.token_ids):
            position = entry.start + i
            slot = entry.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            expected.append((token, position, slot))
        logits_rows += range(len(expected) - entry.num_logits, len(expected))
    rows = zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist(), strict=True)
    assert list(rows) == expected
    assert batch.logits_indices.tolist() == logits_rows
    lengths = [len(entry.token_ids) for entry in entries]
    assert batch.query_lens_cpu == lengths
    assert batch.cu_seqlens_q.diff().tolist() == lengths
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu == [e.start + len(e.token_ids) for e in entries]
    for row, entry in zip(batch.block_tables.tolist(), entries, strict=True):
        assert row[: len(entry.block_table)] == entry.block_table
    assert batch.num_tokens == len(expected)
    assert batch.num_seqs == len(entries)


@pytest.mark.parametrize(
    "entry", [PackEntry([7, 8], 3, [3], 1), PackEntry([7, 8], 5, [3], 1), PackEntry([7], 0, [], 1)]
)
def test_an_entry_beyond_its_block_table_is_an_error(entry: PackEntry) -> None:
    with pytest.raises(IndexError, match="block table"):
        pack([PackEntry([1], 0, [9, 9], 1), entry], BLOCK_SIZE, torch.device("cpu"))


def test_more_logits_than_tokens_are_an_error() -> None:
    with pytest.raises(IndexError, match="logits"):
        pack([PackEntry([7, 8], 0, [3], 3)], BLOCK_SIZE, torch.device("cpu"))
