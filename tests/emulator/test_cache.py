# SPDX-License-Identifier: Apache-2.0
"""Paged caches: rows land in their slots and come back, and CANN's limits hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

BLOCKS, BLOCK, HEADS, DIM = 3, 128, 2, 16


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    key, value = torch.randn(2, count, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return key, value


def scatter(slots: Tensor, key: Tensor, value: Tensor, **changes: Any) -> tuple[Tensor, Tensor]:
    caches = [torch.zeros(BLOCKS, BLOCK, HEADS, DIM, dtype=torch.bfloat16, device="npu") for _ in range(2)]
    arguments = {"cache_mode": "Norm", **changes}
    torch.ops.npu.npu_scatter_pa_kv_cache(key.to("npu"), value.to("npu"), *caches, slots.to("npu"), **arguments)
    return caches[0].cpu(), caches[1].cpu()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_land_in_their_slots_and_nowhere_else(dtype):
    key, value = rows(4)
    slots = torch.tensor([5, 130, 383, 0], dtype=dtype)
    caches = scatter(slots, key, value)
    for cache, written in zip(caches, (key, value), strict=True):
        expected = torch.zeros_like(cache).flatten(0, 1)
        for slot, row in zip(slots.tolist(), written, strict=True):
            expected[slot] = row
        assert torch.equal(cache.flatten(0, 1), expected)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, -1], r"slots must be in \[0, 383\]"),
        ([0, 384], r"slots must be in \[0, 383\]"),
        ([7, 7], "slots must be unique"),
        ([1, 2, 3], r"slot_mapping must be \(2,\)"),
    ],
)
def test_wrong_slots_are_refused(slots, message):
    with pytest.raises(RuntimeError, match=f"npu_scatter_pa_kv_cache.*561002.*{message}"):
        scatter(torch.tensor(slots, dtype=torch.int32), *rows(2))


@pytest.mark.parametrize("changes", [{"cache_mode": "PA_NZ"}, {}])
def test_default_layout_is_refused_for_a_plain_cache(changes):
    key, value = (t.to("npu") for t in rows(1))
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, DIM, dtype=torch.bfloat16, device="npu")
    with pytest.raises(RuntimeError, match='cache_mode="Norm"'):
        torch.ops.npu.npu_scatter_pa_kv_cache(
            key, value, cache, cache.clone(), torch.tensor([0], device="npu"), **changes
        )


def test_mixed_dtypes_gaps_and_shapes_are_refused():
    key, value = rows(2)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="one dtype"):
        scatter(slots, key.half(), value)
    with pytest.raises(RuntimeError, match="axes"):
        scatter(slots, key[0], value[0])
    with pytest.raises(RuntimeError, match="same tokens and heads"):
        scatter(slots, key, value[:1])
    with pytest.raises(RuntimeError, match="int32 or int64"):
        scatter(slots.short(), key, value)
    wide = torch.zeros(2, HEADS, 2 * DIM, dtype=torch.bfloat16, device="npu")[..., :DIM]
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, DIM, dtype=torch.bfloat16, device="npu")
    with pytest.raises(RuntimeError, match="key must be contiguous"):
        torch.ops.npu.npu_scatter_pa_kv_cache(
            wide, wide.contiguous(), cache, cache.clone(), slots.to("npu"), cache_mode="Norm"
        )


def test_gather_lays_sequences_end_to_end():
    generator = torch.Generator().manual_seed(1)
    caches = torch.randn(2, BLOCKS, BLOCK, HEADS, DIM, generator=generator).bfloat16()
    tables = torch.tensor([[2, 0], [1, 9]], dtype=torch.int32)
    lens = torch.tensor([130, 5], dtype=torch.int32)
    out = [torch.ones(135, HEADS, DIM, dtype=torch.bfloat16, device="npu") for _ in range(2)]
    torch.ops.npu.npu_gather_pa_kv_cache(
        caches[0].to("npu"), caches[1].to("npu"), tables.to("npu"), lens.to("npu"), out[0], out[1]
    )
    for cache, result in zip(caches, out, strict=True):
        expected = torch.cat((cache[2], cache[0, :2], cache[1, :5]))
        assert torch.equal(result.cpu(), expected)


def test_scatter_nd_update_writes_at_index_tuples():
    x = torch.arange(24.0).view(4, 6)
    indices = torch.tensor([[1, 2], [3, 0]])
    updates = torch.tensor([-1.0, -2.0])
    device = x.to("npu")
    copied = torch.ops.npu.npu_scatter_nd_update(device, indices.to("npu"), updates.to("npu"))
    expected = x.clone()
    expected[1, 2], expected[3, 0] = -1, -2
    assert torch.equal(copied.cpu(), expected)
    assert torch.equal(device.cpu(), x)
    assert torch.ops.npu.npu_scatter_nd_update_(device, indices.to("npu"), updates.to("npu")) is device
    assert torch.equal(device.cpu(), expected)
    whole_rows = torch.ops.npu.npu_scatter_nd_update(
        device, torch.tensor([[0]], device="npu"), torch.zeros(1, 6, device="npu")
    )
    assert torch.equal(whole_rows[0].cpu(), torch.zeros(6))


@pytest.mark.parametrize(
    ("indices", "updates", "message"),
    [
        (torch.tensor([[4, 0]]), torch.zeros(1), r"axis 0 must be in \[0, 3\]"),
        (torch.tensor([[1, -1]]), torch.zeros(1), "axis 1"),
        (torch.tensor([1]), torch.zeros(1), "2 axes at least"),
        (torch.tensor([[1, 1, 1]]), torch.zeros(1), "at most 2"),
        (torch.tensor([[1, 1]]), torch.zeros(2), r"updates must be \(1,\)"),
        (torch.tensor([[1, 1]]), torch.zeros(1).half(), "updates must be torch.float32"),
        (torch.tensor([[1, 1]]).short(), torch.zeros(1), "int32 or int64"),
    ],
)
def test_wrong_index_tuples_are_refused(indices, updates, message):
    with pytest.raises(RuntimeError, match=f"561002.*{message}"):
        torch.ops.npu.npu_scatter_nd_update(torch.zeros(4, 6, device="npu"), indices.to("npu"), updates.to("npu"))


def test_only_the_plain_layout_exists():
    weight = torch.zeros(32, 64, dtype=torch.float16, device="npu")
    assert torch.ops.npu.npu_format_cast(weight, 2).data_ptr() == weight.data_ptr()
    with pytest.raises(RuntimeError, match="not emulated"):
        torch.ops.npu.npu_format_cast(weight, 29)
