# SPDX-License-Identifier: Apache-2.0
"""npu_fusion_attention_v3, to which torch_npu routes scaled_dot_product_attention, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import FLOATS, require, require_absent, require_dtype

_NAME = "npu_fusion_attention_v3"
_LANES = 8  # softmax_max and softmax_sum repeat each value


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    *others: Any,
    sink: Tensor | None = None,
    **named: Any,
) -> None:
    """Source: op-plugin docs, npu_fusion_attention_v3; what SDPA makes of it is emulated: BNSD, modes 0, 2, 3."""
    require_absent(_NAME, pse=pse, padding_mask=padding_mask, prefix=prefix, sink=sink, actual_seq_qlen=actual_seq_qlen)
    if input_layout != "BNSD" or sparse_mode not in (0, 2, 3) or keep_prob != 1:
        raise NotImplementedError(f"npu::{_NAME}: only BNSD, sparse_mode 0, 2 and 3, and no dropout are emulated")
    require_dtype(_NAME, "query", query, FLOATS)
    require(query.dtype == key.dtype == value.dtype, _NAME, "query, key, value must have one dtype", key.dtype)
    require(query.dim() == 4 and query.shape[1] == head_num, _NAME, "query must have head_num heads", query.shape)
    require(query.shape[1] % key.shape[1] == 0, _NAME, "query heads must be a multiple of key heads", key.shape)
    if atten_mask is not None:
        dtypes = (torch.bool, torch.uint8)
        require(atten_mask.dtype in dtypes, _NAME, "atten_mask must be bool or uint8", atten_mask.dtype)


def _probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, sparse_mode: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax [b, heads, q, kv] in fp32, with the maximum and the sum of every row [b, heads, q, 1]."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    rows, columns = scores.shape[-2:]
    if sparse_mode:
        first = columns - rows if sparse_mode == 3 else 0
        hidden: Tensor | None = torch.ones(rows, columns, dtype=torch.bool).triu(first + 1)
    else:
        hidden = None if mask is None else mask != 0
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp().nan_to_num(0.0)
    total = weights.sum(-1, keepdim=True)
    return (weights / total).nan_to_num(0.0), top, total


def _repeat(kv: Tensor, heads: int) -> Tensor:
    return kv.repeat_interleave(heads // kv.shape[1], 1)


@kernel(_NAME, "aclnnFlashAttentionScore", "aclnnFlashAttentionScoreV2", "aclnnFlashAttentionScoreV3", check=check)
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: None = None,
    padding_mask: None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: None = None,
    actual_seq_qlen: None = None,
    actual_seq_kvlen: None = None,
    sparse_mode: int = 0,
    *others: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
    """Attention, the maximum and the sum of each row; the softmax itself and the dropout's state are not made."""
    weights, top, total = _probabilities(query, _repeat(key, head_num), atten_mask, scale, sparse_mode)
    result = (weights @ _repeat(value, head_num).float()).to(query.dtype)
    shape = (*top.shape[:-1], _LANES)
    return result, top.expand(shape), total.expand(shape), None, None, None


@kernel(
    "npu_fusion_attention_grad_v3",
    "aclnnFlashAttentionScoreGrad",
    "aclnnFlashAttentionScoreGradV2",
    "aclnnFlashAttentionScoreGradV3",
)
def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale_value: float = 1.0,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    """The gradients of query, key and value, from the softmax computed once more."""
    keys, values, grad = _repeat(key, head_num).float(), _repeat(value, head_num).float(), dy.float()
    weights, _, _ = _probabilities(query, keys, atten_mask, scale_value, sparse_mode)
    d_weights = grad @ values.transpose(-1, -2)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * scale_value

    def fold(d: Tensor, like: Tensor) -> Tensor:
        return d.reshape(*like.shape[:2], -1, *like.shape[2:]).sum(2).to(like.dtype)

    d_key = fold(d_scores.transpose(-1, -2) @ query.float(), key)
    d_value = fold(weights.transpose(-1, -2) @ grad, value)
    return (d_scores @ keys).to(query.dtype), d_key, d_value, None, None
