# SPDX-License-Identifier: Apache-2.0
"""Routing of tokens to experts and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import FLOATS, refuse, require, require_absent, require_dtype

_MAX_K, _MAX_EXPERTS = 1024, 2048


def check_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> None:
    """Source: op-plugin docs, npu_moe_gating_top_k_softmax."""
    name = "npu_moe_gating_top_k_softmax"
    require_absent(name, finished=finished)
    require_dtype(name, "x", x, FLOATS)
    require(x.dim() in (2, 3), name, "x must have 2 or 3 axes", tuple(x.shape))
    require(0 < k <= min(_MAX_K, x.shape[-1]), name, f"k must be 1 to {min(_MAX_K, x.shape[-1])}", k)


def _top(scores: Tensor, k: int) -> Tensor:
    """The indices of the k largest, the earlier one first among equals."""
    order: Tensor = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :k]


@kernel(
    "npu_moe_gating_top_k_softmax",
    "aclnnMoeGatingTopKSoftmax",
    "aclnnMoeGatingTopKSoftmaxV2",
    check=check_softmax,
)
def gating_top_k_softmax(x: Tensor, finished: None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, experts and row numbers, each [..., k]; the weights are not normalised again."""
    scores = x.float().softmax(-1)
    experts = _top(scores, k)
    count = experts.numel() // k
    rows = torch.arange(count * k).view(k, count).t().reshape(experts.shape)
    return scores.gather(-1, experts).to(x.dtype), experts.int(), rows.int()


def check_gating(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    **others: Any,
) -> None:
    """Source: op-plugin docs, npu_moe_gating_top_k."""
    name = "npu_moe_gating_top_k"
    require_absent(name, input_ids=input_ids, tid2eid=tid2eid)
    require_dtype(name, "x", x, FLOATS)
    experts = x.shape[-1]
    require(x.dim() == 2 and experts <= _MAX_EXPERTS, name, f"x must be (rows, up to {_MAX_EXPERTS})", tuple(x.shape))
    if bias is not None:
        fits = bias.dtype == x.dtype and tuple(bias.shape) == (experts,)
        require(fits, name, f"bias must be {x.dtype} of ({experts},)", (bias.dtype, tuple(bias.shape)))
    require(group_count > 0 and experts % group_count == 0, name, "groups must divide the experts", group_count)
    size = experts // group_count
    require(size > 2, name, "a group must have more than 2 experts", size)
    padded = -(-size // 32) * 32 * group_count
    require(padded <= _MAX_EXPERTS, name, f"groups padded to 32 must have {_MAX_EXPERTS} experts at most", padded)
    require(1 <= k_group <= group_count, name, f"k_group must be 1 to {group_count}", k_group)
    require(1 <= k <= size * k_group, name, f"k must be 1 to {size * k_group}", k)
    require(renorm == 0, name, "renorm must be 0", renorm)
    modes = (norm_type, group_select_mode)
    require(set(modes) <= {0, 1}, name, "norm_type and group_select_mode must be 0 or 1", modes)


@kernel("npu_moe_gating_top_k", "aclnnMoeGatingTopK", "aclnnMoeGatingTopKV2", check=check_gating)
def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights [rows, k], experts [rows, k], and the scores of all experts if `out_flag`."""
    scores = x.float().sigmoid() if norm_type == 1 else x.float().softmax(-1)
    ranked = scores if bias is None else scores + bias.float()
    if group_count > 1:
        grouped = ranked.reshape(len(ranked), group_count, -1)
        best = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _top(best, k_group), True)
        ranked = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = _top(ranked, k)
    weights = scores.gather(-1, experts)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.int(), scores if out_flag else None


def check_init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    **others: Any,
) -> None:
    """Source: op-plugin docs, npu_moe_init_routing_v2; dropless and unquantized, over all experts."""
    name = "npu_moe_init_routing_v2"
    require_absent(name, scale=scale, offset=offset, drop_pad_mode=drop_pad_mode)
    limit = "active_expert_range must be given: torch_npu keeps its default, [0, expert_num], from the first call"
    require(bool(active_expert_range), name, limit, active_expert_range)
    if quant_mode != -1 or list(active_expert_range or ()) != [0, expert_num]:
        raise NotImplementedError(f"npu::{name}: only quant_mode -1 and the range of all experts are emulated")
    if active_num not in (-1, 0, expert_idx.numel()) or expert_tokens_num_type not in (0, 1):
        raise NotImplementedError(f"npu::{name}: active_num and expert_tokens_num_type 2 are not emulated")
    require_dtype(name, "x", x, FLOATS)
    require(expert_idx.dtype == torch.int32, name, "expert_idx must be int32", expert_idx.dtype)
    fits = x.dim() == 2 and expert_idx.dim() == 2 and x.shape[0] == expert_idx.shape[0]
    require(fits, name, "x must be (rows, H) and expert_idx (rows, K)", (tuple(x.shape), tuple(expert_idx.shape)))
    require(0 < expert_num <= 10240, name, "expert_num must be 1 to 10240", expert_num)
    require(row_idx_type in (0, 1), name, "row_idx_type must be 0 or 1", row_idx_type)


@kernel("npu_moe_init_routing_v2", "aclnnMoeInitRoutingV2", "aclnnMoeInitRoutingV3", check=check_init_routing)
def init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    row_idx_type: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor | None, None]:
    """Rows sorted by expert [rows * K, H], where each row went (or came from), and tokens per expert."""
    flat = expert_idx.flatten().long()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < expert_num:
        refuse(
            "npu_moe_init_routing_v2", f"experts must be in [0, {expert_num - 1}]", (int(flat.min()), int(flat.max()))
        )
    order = flat.sort(stable=True).indices
    row_idx = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))) if row_idx_type == 0 else order
    counts = torch.bincount(flat, minlength=expert_num)
    tokens = counts if expert_tokens_num_type == 1 else counts.cumsum(0)
    return x[order // expert_idx.shape[1]], row_idx.int(), tokens if expert_tokens_num_flag else None, None


def check_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> None:
    """Source: op-plugin, test_npu_moe_token_permute_and_unpermute.py."""
    name = "npu_moe_token_unpermute"
    require_absent(name, padded_mode=padded_mode)
    require_dtype(name, "permuted_tokens", permuted_tokens, FLOATS)
    require(sorted_indices.dtype == torch.int32, name, "sorted_indices must be int32", sorted_indices.dtype)
    count = sorted_indices.numel()
    require(permuted_tokens.shape[0] == count, name, "sorted_indices must have an item per row", (count,))
    if probs is not None:
        fits = probs.dim() == 2 and probs.numel() == count and probs.dtype in FLOATS
        require(fits, name, f"probs must be (tokens, K), {count} in all", (probs.dtype, tuple(probs.shape)))


@kernel("_npu_moe_token_unpermute", "aclnnMoeTokenUnpermute", check=check_unpermute)
def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, None]:
    """The rows of every token summed, weighted by `probs` [tokens, K]."""
    k = 1 if probs is None else probs.shape[1]
    rows = permuted_tokens[sorted_indices.flatten().long()].float()
    rows = rows.reshape(-1, k, rows.shape[-1])
    weighted = rows if probs is None else rows * probs.float().unsqueeze(-1)
    return weighted.sum(1).to(permuted_tokens.dtype), None
