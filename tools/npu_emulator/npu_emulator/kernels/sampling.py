# SPDX-License-Identifier: Apache-2.0
"""Filters of logits before sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import FLOATS, refuse, require, require_dtype

_NAME = "npu_top_k_top_p"
_MAX_K = 1024


def check(logits: Tensor, p: Tensor, k: Tensor) -> None:
    """Source: op-plugin docs, npu_top_k_top_p."""
    require_dtype(_NAME, "logits", logits, FLOATS)
    require(logits.dim() == 2, _NAME, "logits must have 2 axes", tuple(logits.shape))
    rows = tuple(logits.shape[:1])
    require(tuple(p.shape) == rows and p.dtype == logits.dtype, _NAME, f"p must be {logits.dtype} of {rows}", p.dtype)
    require(tuple(k.shape) == rows and k.dtype == torch.int32, _NAME, f"k must be int32 of {rows}", k.dtype)


@kernel(_NAME, "aclnnApplyTopKTopP", check=check)
def top_k_top_p(logits: Tensor, p: Tensor, k: Tensor) -> Tensor:
    """The logits with -inf where the k-th largest, or the p of the probability, leaves a token out."""
    largest = min(_MAX_K, logits.shape[1])
    if bool(((k < 1) | (k > largest)).any()):
        refuse(_NAME, f"k must be in [1, {largest}]", k.tolist()[:16])
    if bool(((p < 0) | (p > 1)).any()):
        refuse(_NAME, "p must be in [0, 1]", p.tolist()[:16])
    ordered, order = logits.float().sort(dim=-1, stable=True)
    threshold = ordered.gather(-1, (logits.shape[1] - k.long()).unsqueeze(-1))
    ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    hidden = ordered.softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(-1)
    hidden[:, -1] = False
    ordered = ordered.masked_fill(hidden, float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, order, ordered).to(logits.dtype)
