# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

import pytest
import torch

from adaflash.ops.host_batch import StaticBatch
from adaflash.ops.metadata import PackedBatch
from adaflash.speculative.packing import PackEntry, lay_out, pack

CPU = torch.device("cpu")


def entries(first: int) -> list[PackEntry]:
    return [PackEntry([first, first + 1, first + 2], 5, [3, 1], 2), PackEntry([first + 3], 0, [2], 1)]


def tensors(batch: PackedBatch) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def test_a_batch_comes_out_of_one_buffer() -> None:
    batch = pack(entries(10), 4, CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 13]
    assert batch.positions.tolist() == [5, 6, 7, 0]
    assert batch.slot_mapping.tolist() == [1 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 2 * 4]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [8, 1]
    assert batch.block_tables.tolist() == [[3, 1], [2, 0]]
    assert batch.logits_indices.tolist() == [1, 2, 3]
    dtypes = {name: tensor.dtype for name, tensor in tensors(batch).items()}
    assert {name for name, dtype in dtypes.items() if dtype is torch.int32} == {
        "cu_seqlens_q",
        "seq_lens",
        "block_tables",
    }
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors(batch).values()}) == 1


def test_block_tables_are_as_wide_as_wanted() -> None:
    assert lay_out(entries(0), 4, table_width=5).on(CPU).block_tables.tolist() == [[3, 1, 0, 0, 0], [2, 0, 0, 0, 0]]
    with pytest.raises(IndexError, match="wider than the batch's"):
        lay_out(entries(0), 4, table_width=1)


def test_a_static_batch_takes_new_values_where_the_old_ones_were() -> None:
    static = StaticBatch(lay_out(entries(10), 4), CPU)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(static.batch).items()}
    later = lay_out([PackEntry([7, 8], 1, [0], 1), PackEntry([9, 6], 3, [1, 2], 2)], 4)
    static.load(later)
    expected = later.on(CPU)
    for name, tensor in tensors(static.batch).items():
        assert tensor.data_ptr() == addresses[name], name
        assert torch.equal(tensor, getattr(expected, name)), name
    assert static.batch.query_lens_cpu == [2, 2]
    assert static.batch.seq_lens_cpu == [3, 5]
    assert static.batch.block_tables_cpu == [[0], [1, 2]]
    later.buffer[:] = 0
    assert static.batch.token_ids.tolist() == [7, 8, 9, 6], "it keeps a copy"


def test_a_static_batch_refuses_another_layout() -> None:
    static = StaticBatch(lay_out(entries(10), 4), CPU)
    with pytest.raises(AssertionError, match="one layout"):
        static.load(lay_out(entries(10)[:1], 4))
