# SPDX-License-Identifier: Apache-2.0
"""Operators of torch_npu in the aten namespace that no CPU kernel exists for, put together from others."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulator.registration import register

# torch_npu registers the code that launches these on the autograd key too; it has to reach the device's kernel.
_NOT_DIFFERENTIABLE = ("one_hot",)


def _matmul_backward(
    grad: Tensor, left: Tensor, right: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `left @ right`, for those of both that `mask` asks for."""
    a, b = (left.unsqueeze(0) if left.dim() == 1 else left), (right.unsqueeze(1) if right.dim() == 1 else right)
    g = grad.unsqueeze(-1) if right.dim() == 1 else grad
    g = g.unsqueeze(-2) if left.dim() == 1 else g
    if a.dim() > 2 and b.dim() == 2:  # one product, as for a linear layer
        a, g = a.flatten(0, -2), g.flatten(0, -2)
    d_left = (g @ b.mT).sum_to_size(a.shape).reshape(left.shape) if mask[0] else None
    d_right = (a.mT @ g).sum_to_size(b.shape).reshape(right.shape) if mask[1] else None
    return d_left, d_right


def install() -> None:
    """Register them."""
    register("aten::matmul_backward", _matmul_backward)
    for name in _NOT_DIFFERENTIABLE:
        register(f"aten::{name}", torch.library.fallthrough_kernel, "AutogradPrivateUse1")
