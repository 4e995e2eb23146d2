# SPDX-License-Identifier: Apache-2.0
"""Updates at index tuples, and casts."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import refuse, require

_NAME = "npu_scatter_nd_update"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int8)


def check(input: Tensor, indices: Tensor, updates: Tensor) -> None:
    """Source: op-plugin docs, npu_scatter_nd_update."""
    require(input.dtype in _DTYPES, _NAME, "input must be a float, bool, int64 or int8", input.dtype)
    require(updates.dtype == input.dtype, _NAME, f"updates must be {input.dtype}, as the input", updates.dtype)
    require(indices.dtype in (torch.int32, torch.int64), _NAME, "indices must be int32 or int64", indices.dtype)
    shape = tuple(input.shape)
    require(1 <= input.dim() <= 8, _NAME, "input must have 1 to 8 axes", shape)
    require(indices.dim() >= 2, _NAME, "indices must have 2 axes at least", tuple(indices.shape))
    depth = indices.shape[-1]
    require(depth <= input.dim(), _NAME, f"the last axis of indices must be at most {input.dim()}", depth)
    wanted = (*indices.shape[:-1], *shape[depth:])
    require(tuple(updates.shape) == wanted, _NAME, f"updates must be {wanted}", tuple(updates.shape))


@kernel("npu_scatter_nd_update_", "aclnnScatterNdUpdate", check=check)
def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write `updates[i]` to `input[indices[i]]` in place."""
    depth = indices.shape[-1]
    axes = indices.long().flatten(0, -2).unbind(-1)
    for axis, index in enumerate(axes):
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < input.shape[axis]:
            refuse(_NAME, f"indices of axis {axis} must be in [0, {input.shape[axis] - 1}]", index.tolist()[:16])
    input[axes] = updates.reshape(-1, *input.shape[depth:])
    return input


@kernel("npu_scatter_nd_update", "aclnnScatterNdUpdate", check=check)
def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """The same into a copy."""
    return scatter_nd_update_(input.clone(), indices, updates)


@kernel("_npu_dtype_cast", "aclnnCast")
def dtype_cast(input: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype."""
    return input.to(dtype)
