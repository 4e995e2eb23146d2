# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and after a residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import FLOATS, HALVES, require, require_dtype


def _check_gamma(operator: str, x: Tensor, gamma: Tensor) -> None:
    """Source: op-plugin docs, npu_rms_norm and npu_add_rms_norm."""
    dims = gamma.dim()
    fits = 0 < dims <= x.dim() and tuple(x.shape[-dims:]) == tuple(gamma.shape)
    require(fits, operator, f"gamma must have the last axes of the input {tuple(x.shape)}", tuple(gamma.shape))


def check_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    """The dtype table and the shape of gamma."""
    require_dtype("npu_rms_norm", "input", input, FLOATS)
    mixed = input.dtype in HALVES and gamma.dtype == torch.float32
    require(gamma.dtype == input.dtype or mixed, "npu_rms_norm", f"gamma must be {input.dtype} or float32", gamma.dtype)
    _check_gamma("npu_rms_norm", input, gamma)


def check_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    """One dtype, one shape, nothing empty."""
    name = "npu_add_rms_norm"
    require_dtype(name, "x1", x1, FLOATS)
    require(x1.dtype == x2.dtype == gamma.dtype, name, "x1, x2 and gamma must have one dtype", (x2.dtype, gamma.dtype))
    require(x1.shape == x2.shape, name, f"x2 must have the shape of x1, {tuple(x1.shape)}", tuple(x2.shape))
    require(x1.numel() > 0, name, "x1 must not be empty", tuple(x1.shape))
    _check_gamma(name, x1, gamma)


def _normalize(x: Tensor, gamma: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in fp32; one rounding, of the product with gamma."""
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(dtype), rstd


@kernel("npu_rms_norm", "aclnnRmsNorm", check=check_rms_norm)
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The normalised input, and 1 / RMS in fp32."""
    return _normalize(input.float(), gamma, epsilon, input.dtype)


@kernel("npu_add_rms_norm", "aclnnAddRmsNorm", check=check_add_rms_norm)
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised sum, 1 / RMS in fp32, and the sum; the norm sees the sum before it is rounded."""
    total = x1.float() + x2.float()
    return (*_normalize(total, gamma, epsilon, x1.dtype), total.to(x1.dtype))


@kernel("npu_rms_norm_backward", "aclnnRmsNormGrad")
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the input and of gamma, the latter in fp32."""
    grad, scale = dy.float(), gamma.float()
    normed = input.float() * rstd
    dims = tuple(range(input.dim() - gamma.dim(), input.dim()))
    weighted = grad * scale
    dx = rstd * (weighted - normed * (weighted * normed).mean(dims, keepdim=True))
    rows = tuple(range(input.dim() - gamma.dim()))
    return dx.to(input.dtype), (grad * normed).sum(rows) if rows else grad * normed
