# SPDX-License-Identifier: Apache-2.0
"""Kernels of torch_npu's own operators, one module for each kind; each checks the limits that CANN documents."""

from npu_emulator.kernels import (
    activation,
    attention,
    cache,
    fusion_attention,
    matmul,
    moe,
    norm,
    rope,
    sampling,
    scatter,
)
from npu_emulator.kernels.registry import install

__all__ = [
    "activation",
    "attention",
    "cache",
    "fusion_attention",
    "install",
    "matmul",
    "moe",
    "norm",
    "rope",
    "sampling",
    "scatter",
]
