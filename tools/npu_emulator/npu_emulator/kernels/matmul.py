# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix multiplication: each group of rows has a weight of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import FLOATS, refuse, require, require_absent, require_dtype

_NAME = "npu_grouped_matmul"
_INNER_LIMIT = 65536


def check(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: Any,
) -> None:
    """Source: op-plugin docs, npu_grouped_matmul, group_list as a tensor, without quantization."""
    require_absent(_NAME, **others)
    if len(x) != 1 or len(weight) != 1 or split_item not in (2, 3) or group_type != 0:
        raise NotImplementedError(f"npu::{_NAME}: only one x, one weight, split_item 2 or 3, group_type 0 are emulated")
    rows, table = x[0], weight[0]
    require_dtype(_NAME, "x", rows, FLOATS)
    require(table.dtype == rows.dtype, _NAME, f"weight must be {rows.dtype}, as x", table.dtype)
    require(rows.dim() == 2 and table.dim() == 3, _NAME, "x must have 2 axes and weight 3", (rows.shape, table.shape))
    require(rows.shape[1] == table.shape[1], _NAME, "weight must be (groups, K, N)", (rows.shape, table.shape))
    inner = (rows.shape[-1], table.shape[-1])
    require(max(inner) < _INNER_LIMIT, _NAME, f"the last axes must be below {_INNER_LIMIT}", inner)
    if group_list is None or group_list.dtype != torch.int64 or tuple(group_list.shape) != tuple(table.shape[:1]):
        shown = None if group_list is None else (group_list.dtype, tuple(group_list.shape))
        refuse(_NAME, f"group_list must be int64 of ({table.shape[0]},)", shown)
    require(group_list_type in (0, 1), _NAME, "group_list_type must be 0 or 1", group_list_type)
    wanted = torch.float32 if rows.dtype == torch.bfloat16 else rows.dtype
    for one in bias or ():
        require(one.dtype == wanted, _NAME, f"bias must be {wanted} for {rows.dtype}", one.dtype)


@kernel(
    _NAME,
    "aclnnGroupedMatmulV3",
    "aclnnGroupedMatmulV4",
    "aclnnGroupedMatmulV5",
    "aclnnGroupedMatmulWeightNz",
    check=check,
)
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor,
    group_list_type: int | None = 0,
    **others: Any,
) -> list[Tensor]:
    """One tensor [rows, N]; rows beyond the last group are NaN, since a device leaves them as they were."""
    rows, table = x[0], weight[0]
    counts = group_list if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1))
    if bool((counts < 0).any()) or int(counts.sum()) > rows.shape[0]:
        refuse(_NAME, f"groups must not be negative and have {rows.shape[0]} rows at most", group_list.tolist())
    result = torch.full((rows.shape[0], table.shape[-1]), float("nan"))
    start = 0
    for group, count in enumerate(counts.tolist()):
        product = rows[start : start + count].float() @ table[group].float()
        result[start : start + count] = product if not bias else product + bias[0][group].float()
        start += count
    return [result.to(rows.dtype)]
