# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch

from adaflash.ops import fetch as module
from adaflash.ops.fetch import fetch

TENSORS = (
    torch.tensor([[1, -2], [3, 2**40]]),
    torch.tensor([0.5, float("nan"), float("-inf")]),
    torch.tensor([True, False, True]),
    torch.zeros(0, 4, dtype=torch.int64),
    torch.arange(6, dtype=torch.int32).reshape(2, 3).T,
)


def test_tensors_of_the_cpu_come_without_a_copy() -> None:
    values = fetch(*TENSORS)
    assert all(
        np.shares_memory(value, tensor.numpy()) for value, tensor in zip(values, TENSORS, strict=True) if value.size
    )


def test_tensors_of_a_device_come_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    to_cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or to_cpu(tensor))
    monkeypatch.setattr(module, "_is_on_host", lambda tensor: False)
    values = fetch(*TENSORS)
    assert len(copies) == 1
    for value, tensor in zip(values, TENSORS, strict=True):
        expected = tensor.numpy()
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)
