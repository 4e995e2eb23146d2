# SPDX-License-Identifier: Apache-2.0
"""npu_fused_infer_attention_score over packed sequences, with a paged or a packed cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from npu_emulator.kernels import attention_limits as limits
from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import refuse, require

_FAR = 2147483647


def workspace_bytes(query: Tensor) -> int:
    """What the operator asks for at most; the formula is the emulator's own, only its use is CANN's."""
    return (1 << 20) + 4 * query.numel()


def check_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor | None = None,
    out: Sequence[Tensor],
    **arguments: Any,
) -> None:
    """The operator's limits, its outputs and its workspace."""
    limits.check(query, key, value, **arguments)
    name = f"{limits.NAME}.out"
    require(len(out) == 2, name, "out must be [attention, softmax_lse]", len(out))
    fits = out[0].shape[:2] == query.shape[:2] and out[0].dtype == query.dtype and out[0].is_contiguous()
    require(fits, name, f"out[0] must be a contiguous {query.dtype} of {tuple(query.shape)}", tuple(out[0].shape))
    if workspace is not None:
        room, needed = workspace.numel() * workspace.element_size(), workspace_bytes(query)
        require(room >= needed, name, f"workspace must have {needed} bytes", room)


def _check_mask_values(mask: Tensor) -> None:
    size = limits.MASK_SIZE
    expected = torch.ones(size, size, dtype=torch.bool).triu_(1)
    if not torch.equal(mask.reshape(size, size) != 0, expected):
        refuse(limits.NAME, f"atten_mask must be triu(ones({size}, {size}), 1)", "other values")


def _visible(num_query: int, num_kv: int, sparse_mode: int, pre_tokens: int, next_tokens: int) -> Tensor | None:
    """Which keys a query sees, counted from the end of both; None means all."""
    if sparse_mode == 0:
        return None
    if sparse_mode == 3:
        pre_tokens, next_tokens = _FAR, 0
    # Query i stands at position num_kv - num_query + i; key j is seen from j - next_tokens up to j + pre_tokens.
    distance = torch.arange(num_kv) - (num_kv - num_query + torch.arange(num_query)).unsqueeze(1)
    return (distance <= next_tokens) & (distance >= -pre_tokens)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of one request in fp32.

    Args:
        query: [tokens, heads, dim]
        key: [kv, kv_heads, dim]
        value: [kv, kv_heads, value_dim]
        scale: Of the products.
        visible: [tokens, kv], or None for all.

    Returns:
        [tokens, heads, value_dim], 0 where a query sees nothing, and the log of the softmax's sum [tokens, heads].
    """
    tokens, heads, _ = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(tokens, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3)
    scores = grouped @ key.float().permute(1, 2, 0).unsqueeze(1) * scale  # [kv_heads, group, tokens, kv]
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    result = weights @ value.float().transpose(0, 1).unsqueeze(1)  # [kv_heads, group, tokens, value_dim]
    return result.permute(2, 0, 1, 3).reshape(tokens, heads, -1), lse.permute(2, 0, 1).reshape(tokens, heads)


def _pages(cache: Tensor, block_table: Tensor, num_tokens: int, kv_heads: int) -> Tensor:
    """The first `num_tokens` rows of a paged cache, [num_tokens, kv_heads, dim]."""
    blocks = block_table[: -(-num_tokens // limits.BLOCK_SIZE)].long()
    if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < cache.shape[0]:
        refuse(limits.NAME, f"blocks in use must be in [0, {cache.shape[0] - 1}]", blocks.tolist())
    pages = cache[blocks]
    pages = pages.transpose(1, 2) if cache.dim() == 4 else pages.reshape(*pages.shape[:2], kv_heads, -1)
    return pages.reshape(-1, kv_heads, pages.shape[-1])[:num_tokens]


def _keys_and_values(
    key: Tensor, value: Tensor, block_table: Tensor | None, kv_lens: list[int], kv_heads: int
) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    for request, num_tokens in enumerate(kv_lens):
        if block_table is None:
            yield key[start : start + num_tokens], value[start : start + num_tokens]
        else:
            table = block_table[request]
            yield _pages(key, table, num_tokens, kv_heads), _pages(value, table, num_tokens, kv_heads)
        start += num_tokens


@kernel(limits.NAME, "aclnnFusedInferAttentionScoreV2", "aclnnFusedInferAttentionScoreV3", check=limits.check)
def attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _FAR,
    next_tokens: int = _FAR,
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    softmax_lse_flag: bool = False,
    **others: object,
) -> tuple[Tensor, Tensor | None]:
    """Attention [tokens, heads, value_dim] and, if asked for, the log-sum-exp [tokens, heads, 1] in fp32."""
    lens = limits.lengths(actual_seq_lengths, actual_seq_lengths_kv, query.shape[0], block_table is not None)
    if atten_mask is not None:
        _check_mask_values(atten_mask)
    parts, sums, start = [], [], 0
    cached = _keys_and_values(key, value, block_table, lens.kv, num_key_value_heads or num_heads)
    for num_query, num_kv, (k, v) in zip(lens.query, lens.kv, cached, strict=True):
        visible = _visible(num_query, num_kv, sparse_mode, pre_tokens, next_tokens)
        part, lse = _attend(query[start : start + num_query], k, v, scale, visible)
        parts.append(part)
        sums.append(lse)
        start += num_query
    return torch.cat(parts).to(query.dtype), torch.cat(sums).unsqueeze(-1) if softmax_lse_flag else None


@kernel(f"{limits.NAME}.out", "aclnnFusedInferAttentionScoreV2", "aclnnFusedInferAttentionScoreV3", check=check_out)
def attention_score_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor | None = None,
    out: Sequence[Tensor],
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same into `out`."""
    return attention_score(query, key, value, **arguments)


@kernel(
    "_npu_fused_infer_attention_score_get_max_workspace",
    "aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize",
    check=limits.check,
    allocates=lambda query, *_, **__: torch.empty(workspace_bytes(query), dtype=torch.uint8, device=query.device),
)
def max_workspace(query: Tensor, *arguments: Any, **named: Any) -> None:
    """A workspace for any lengths; nothing is computed."""
