# SPDX-License-Identifier: Apache-2.0
"""CANN's documented limits: an operator that is called outside of them fails here as it would on a device."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NoReturn

import torch
from torch import Tensor

from npu_emulator import settings

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


@functools.cache
def _lifts() -> frozenset[str]:
    return settings.from_environment().lifts


class LimitError(RuntimeError):
    """A call is outside of what CANN documents; says which limit and what was given."""


def refuse(operator: str, limit: str, got: object) -> NoReturn:
    """Raise the error of a broken limit; 561002 is what aclnn returns when it cannot tile an operator."""
    operator = operator if "::" in operator else f"npu::{operator}"
    raise LimitError(f"{operator}: error code 561002: {limit}; got {got}")


def require(condition: bool, operator: str, limit: str, got: object) -> None:
    """Refuse unless `condition` holds."""
    if not condition:
        refuse(operator, limit, got)


def require_dtype(operator: str, name: str, tensor: Tensor, allowed: Collection[torch.dtype]) -> None:
    """Refuse a dtype, unless dtypes are not to be checked and it is a float."""
    if tensor.dtype in allowed or (tensor.dtype in FLOATS and "dtype" in _lifts()):
        return
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    refuse(operator, f"{name} must be of {names}", tensor.dtype)


def require_contiguous(operator: str, **tensors: Tensor | None) -> None:
    """Refuse tensors with gaps or transposed axes."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            refuse(operator, f"{name} must be contiguous", f"shape {tuple(tensor.shape)}, strides {tensor.stride()}")


def require_absent(operator: str, **arguments: object) -> None:
    """Refuse arguments whose meaning the emulator does not know."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value not in (None, False, 0):
            raise NotImplementedError(f"npu::{operator}: {name} is not emulated")
