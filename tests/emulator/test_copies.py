# SPDX-License-Identifier: Apache-2.0
"""Copies keep values, whatever the dtypes, strides and sides are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


def strided(shape: list[int], layout: str, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1, 1 + int(torch.tensor(shape).prod())).reshape(shape).to(dtype)
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "offset":
        return torch.cat((values, values))[shape[0] :]
    if layout == "strided":
        return values.repeat_interleave(2, -1)[..., ::2]
    return values


@given(
    shape=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    layouts=st.tuples(*[st.sampled_from(["contiguous", "transposed", "offset", "strided"])] * 2),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 2),
    sides=st.sampled_from([("cpu", "npu"), ("npu", "cpu"), ("npu", "npu")]),
    non_blocking=st.booleans(),
)
@settings(deadline=None, max_examples=120)
def test_copy_equals_the_cpus(shape, layouts, dtypes, sides, non_blocking):
    source = strided(shape, layouts[0], dtypes[0])
    target = strided(shape, layouts[1], dtypes[1])
    expected = target.clone().copy_(source)
    # `.to` keeps strides, so both sides look as they do on the CPU.
    on_device = target.to(sides[1]).clone() if layouts[1] == "contiguous" else strided_on(target, sides[1])
    on_device.copy_(strided_on(source, sides[0]), non_blocking=non_blocking)
    torch.npu.synchronize()
    assert torch.equal(on_device.cpu(), expected)


def strided_on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The same values, strides and offset on `device`."""
    base = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return torch.as_strided(base.to(device), tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_changes_device_and_dtype_at_once(dtype):
    values = torch.tensor([[0.0, 1.5, 2.0], [3.0, 0.0, 250.0]])
    moved = values.to("npu", dtype)
    assert moved.device.type == "npu"
    assert torch.equal(moved.cpu(), values.to(dtype))
    assert torch.equal(moved.to(torch.float32).cpu(), values.to(dtype).float())


def test_broadcast_into_a_slice():
    target = torch.zeros(3, 4, device="npu")
    target[1:, ::2] = torch.tensor([[1.0], [2.0]])
    assert target.tolist() == [[0, 0, 0, 0], [1, 0, 1, 0], [2, 0, 2, 0]]


def test_item_and_tolist_read_the_device():
    x = torch.arange(5, device="npu") * 3
    assert x[3].item() == 9
    assert x.tolist() == [0, 3, 6, 9, 12]


def test_pinned_copy_round_trip():
    host = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).pin_memory()
    device = host.to("npu", non_blocking=True)
    back = torch.empty_like(host).pin_memory()
    back.copy_(device, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(back, host)
