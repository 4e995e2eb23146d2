# SPDX-License-Identifier: Apache-2.0
"""Brings results of a step to the host together: waiting for a device once is what costs, not the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def fetch(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """Return the values of tensors of one device, in one copy; on the CPU without any.

    Args:
        tensors: Of dtypes that numpy knows.
    """
    if _is_on_host(tensors[0]):
        return [tensor.numpy() for tensor in tensors]
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    host = torch.cat(parts).cpu().numpy()
    ends = np.cumsum([len(part) for part in parts])
    return [
        # A copy, since an array's values must be aligned to their size.
        part.copy().view(_numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        for part, tensor in zip(np.split(host, ends[:-1]), tensors, strict=True)
    ]


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _numpy_dtype(dtype: torch.dtype) -> npt.DTypeLike:
    return torch.empty(0, dtype=dtype).numpy().dtype
