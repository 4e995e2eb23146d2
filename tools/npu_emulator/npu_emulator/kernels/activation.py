# SPDX-License-Identifier: Apache-2.0
"""SwiGLU: silu(first half) * second half."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import FLOATS, require, require_contiguous, require_dtype


def check_swiglu(input: Tensor, dim: int = -1) -> None:
    """Source: op-plugin docs, npu_swiglu."""
    require_dtype("npu_swiglu", "input", input, FLOATS)
    require_contiguous("npu_swiglu", input=input)
    require(input.numel() > 0, "npu_swiglu", "input must not be empty", tuple(input.shape))
    require(input.shape[dim] % 2 == 0, "npu_swiglu", f"axis {dim} of the input must be even", tuple(input.shape))


@kernel("npu_swiglu", "aclnnSwiGlu", check=check_swiglu)
def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """In fp32, rounded once."""
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


@kernel("npu_swiglu_backward", "aclnnSwiGluGrad")
def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """The gradient of the input."""
    gate, up = input.float().chunk(2, dim)
    grad, sigmoid = grad_output.float(), torch.sigmoid(gate)
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((d_gate, grad * gate * sigmoid), dim).to(input.dtype)
