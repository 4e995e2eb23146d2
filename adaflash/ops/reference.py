# SPDX-License-Identifier: Apache-2.0
"""Reference bodies of the ops: the definition of what each op computes, in plain PyTorch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from adaflash.ops.metadata import AttentionMetadata, NormOutput


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> NormOutput:
    """See `Backend.rms_norm`."""
    summed = x if residual is None else x + residual
    wide = summed.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return NormOutput(normed.to(x.dtype) * weight, summed)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x_i, x_{i + rotary_dim/2}) of x [T, heads, D] by the angles behind cos/sin [T, rotary_dim / 2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def write_kv(k: Tensor, v: Tensor, k_cache_: Tensor, v_cache_: Tensor, slot_mapping: Tensor) -> None:
    """See `Backend.write_kv`; cache layout [num_blocks, block_size, Hkv, D]."""
    k_cache_.view(-1, *k_cache_.shape[2:])[slot_mapping] = k
    v_cache_.view(-1, *v_cache_.shape[2:])[slot_mapping] = v


def attention_mask(query_len: int, seq_len: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return [query_len, seq_len] bool, True where the right-aligned query may see the key."""
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_pos = torch.arange(seq_len, device=device)[None, :]
    mask = key_pos <= query_pos if causal else torch.ones(query_len, seq_len, dtype=torch.bool, device=device)
    return mask if window is None else mask & (key_pos > query_pos - window)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """See `Backend.paged_attention`; cache layout [num_blocks, block_size, Hkv, D], softmax in fp32."""
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    groups = q.shape[1] // num_kv_heads
    outputs, start = [], 0
    for query_len, seq_len, blocks in zip(meta.query_lens_cpu, meta.seq_lens_cpu, meta.block_tables_cpu, strict=True):
        used = blocks[: -(-seq_len // block_size)]
        k = k_cache[used].flatten(0, 1)[:seq_len].repeat_interleave(groups, dim=1).float()  # [s, Hq, D]
        v = v_cache[used].flatten(0, 1)[:seq_len].repeat_interleave(groups, dim=1).float()
        rows = q[start : start + query_len].float()
        scores = torch.einsum("qhd,khd->hqk", rows, k) * scale
        mask = attention_mask(query_len, seq_len, causal, window, q.device)
        probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probs, v).to(q.dtype))
        start += query_len
    if start < q.shape[0]:
        outputs.append(q.new_zeros(q.shape[0] - start, *q.shape[1:]))
    return torch.cat(outputs) if outputs else torch.empty_like(q)


def copy_blocks(k_cache_: Tensor, v_cache_: Tensor, pairs: list[tuple[int, int]]) -> None:
    """See `Backend.copy_blocks`; the block index is the first dimension."""
    if not pairs:
        return
    sources, destinations = (list(column) for column in zip(*pairs, strict=True))
    k_cache_[destinations] = k_cache_[sources]
    v_cache_[destinations] = v_cache_[sources]
