# SPDX-License-Identifier: Apache-2.0
"""The limits of npu_fused_infer_attention_score for packed sequences (input_layout TND).

Source: op-plugin docs, torch_npu-npu_fused_infer_attention_score.md (the sections on axes, PageAttention and TND), and
for what the docs leave open vllm-ascend: with a block table actual_seq_lengths_kv counts per request (its
attention_v1.py), and blocks have 128 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from npu_emulator.limits import HALVES, refuse, require, require_absent, require_contiguous, require_dtype

NAME = "npu_fused_infer_attention_score"
BLOCK_SIZE = 128
MASK_SIZE = 2048
_MAX_BATCH, _MAX_HEADS, _MAX_RATIO, _MAX_ROW = 4096, 256, 64, 65535
_HEAD_DIMS = {128: (128,), 192: (128, 192)}
_EMULATED_MODES = (0, 3, 4)


class Lengths(NamedTuple):
    """Tokens of each request.

    Attributes:
        query: Query tokens.
        kv: Keys and values, the query's own among them.
    """

    query: list[int]
    kv: list[int]


def per_request(cumulative: Sequence[int]) -> list[int]:
    """Lengths from their running sums, which begin with the first length."""
    return [end - start for start, end in pairwise([0, *cumulative])]


def lengths(query: Sequence[int] | None, kv: Sequence[int] | None, num_tokens: int, paged: bool) -> Lengths:
    """Check both lists of lengths and take them apart."""
    if query is None or kv is None:
        refuse(NAME, "TND needs actual_seq_lengths and actual_seq_lengths_kv", (query, kv))
    require(0 < len(query) <= _MAX_BATCH, NAME, f"there must be 1 to {_MAX_BATCH} requests", len(query))
    require(len(kv) == len(query), NAME, f"actual_seq_lengths_kv must have {len(query)} items", len(kv))
    query_lens = per_request(query)
    require(min(query_lens) >= 0, NAME, "actual_seq_lengths must be cumulative", list(query)[:8])
    limit = f"the last of actual_seq_lengths must be the number of query tokens, {num_tokens}"
    require(query[-1] == num_tokens, NAME, limit, query[-1])
    kv_lens = list(kv) if paged else per_request(kv)
    kind = "counts per request (paged)" if paged else "cumulative (not paged)"
    require(min(kv_lens) >= 0, NAME, f"actual_seq_lengths_kv must be {kind}", list(kv)[:8])
    return Lengths(query_lens, kv_lens)


def _check_heads(query: Tensor, num_heads: int, num_kv_heads: int) -> None:
    require(query.dim() == 3, NAME, "a TND query must be (tokens, heads, head_dim)", tuple(query.shape))
    require(query.shape[1] == num_heads, NAME, f"num_heads must be {query.shape[1]}, as in the query", num_heads)
    heads = (num_heads, num_kv_heads)
    require(min(heads) > 0 and max(heads) <= _MAX_HEADS, NAME, f"heads must be 1 to {_MAX_HEADS}", heads)
    divides = num_heads % num_kv_heads == 0 and num_heads // num_kv_heads <= _MAX_RATIO
    require(divides, NAME, f"num_heads must be 1 to {_MAX_RATIO} times num_key_value_heads", heads)


def _check_head_dims(query_dim: int, key_dim: int, value_dim: int) -> None:
    fits = query_dim == key_dim and value_dim in _HEAD_DIMS.get(query_dim, ())
    limit = "TND needs head_dim 128, or 192 for queries and keys with 128 or 192 for values"
    require(fits, NAME, limit, (query_dim, key_dim, value_dim))


def _paged_head_dim(name: str, cache: Tensor, num_kv_heads: int, block_size: int) -> int:
    """The head dim of a cache; 3 axes are (blocks, block, heads * dim), 4 are (blocks, heads, block, dim)."""
    shape = tuple(cache.shape)
    if cache.dim() == 3:
        limit = f"{name} of 3 axes must be (blocks, {block_size}, {num_kv_heads} * head_dim)"
        require(shape[1] == block_size and shape[2] % num_kv_heads == 0, NAME, limit, shape)
        require(shape[2] <= _MAX_ROW, NAME, f"heads * head_dim must be at most {_MAX_ROW}", shape[2])
        return shape[2] // num_kv_heads
    limit = f"{name} must be (blocks, {block_size}, heads * dim) or (blocks, {num_kv_heads}, {block_size}, dim)"
    require(cache.dim() == 4 and shape[1:3] == (num_kv_heads, block_size), NAME, limit, shape)
    return shape[3]


def _check_paged(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, block_size: int, num_kv_heads: int, kv: list[int]
) -> None:
    require(block_size == BLOCK_SIZE, NAME, f"block_size must be {BLOCK_SIZE}", block_size)
    dims = [_paged_head_dim(name, cache, num_kv_heads, block_size) for name, cache in (("key", key), ("value", value))]
    _check_head_dims(query.shape[-1], *dims)
    require(key.shape[0] == value.shape[0], NAME, "key and value must have as many blocks", (key.shape, value.shape))
    require(block_table.dtype == torch.int32, NAME, "block_table must be int32", block_table.dtype)
    fits = block_table.dim() == 2 and block_table.shape[0] == len(kv)
    require(fits, NAME, f"block_table must be ({len(kv)} requests, blocks)", tuple(block_table.shape))
    room = block_table.shape[1] * block_size
    require(max(kv) <= room, NAME, f"block_table has room for {room} tokens", max(kv))


def _check_packed(query: Tensor, key: Tensor, value: Tensor, num_kv_heads: int, kv: list[int]) -> None:
    for name, tensor in (("key", key), ("value", value)):
        fits = tensor.dim() == 3 and tuple(tensor.shape[:2]) == (sum(kv), num_kv_heads)
        require(fits, NAME, f"a TND {name} must be ({sum(kv)}, {num_kv_heads}, head_dim)", tuple(tensor.shape))
    _check_head_dims(query.shape[-1], key.shape[-1], value.shape[-1])


def _check_mask(sparse_mode: int, mask: Tensor | None, pre_tokens: int, next_tokens: int) -> None:
    require(0 <= sparse_mode <= 4, NAME, "sparse_mode must be 0 to 4", sparse_mode)
    if sparse_mode not in _EMULATED_MODES or (sparse_mode == 0 and mask is not None):
        raise NotImplementedError(f"npu::{NAME}: sparse_mode {sparse_mode} with a mask of one's own is not emulated")
    if sparse_mode == 0:
        return
    if mask is None:
        refuse(NAME, f"sparse_mode {sparse_mode} needs the ({MASK_SIZE}, {MASK_SIZE}) atten_mask", mask)
    square = tuple(mask.shape)[-2:] == (MASK_SIZE, MASK_SIZE) and mask.numel() == MASK_SIZE**2 and mask.dim() <= 4
    require(square, NAME, f"atten_mask must be ({MASK_SIZE}, {MASK_SIZE})", tuple(mask.shape))
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), NAME, "atten_mask must be bool or int8", mask.dtype)
    overlap = sparse_mode != 4 or pre_tokens + next_tokens >= 0
    require(overlap, NAME, "pre_tokens and next_tokens of a band must overlap", (pre_tokens, next_tokens))


def check(
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
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: object,
) -> None:
    """Refuse what CANN does not take, and what the emulator does not know."""
    require_absent(NAME, **others)
    if input_layout != "TND":
        raise NotImplementedError(f"npu::{NAME}: input_layout {input_layout} is not emulated, only TND")
    require_dtype(NAME, "query", query, HALVES)
    same = query.dtype == key.dtype == value.dtype
    require(same, NAME, f"key and value must be {query.dtype}, as the query", (key.dtype, value.dtype))
    require_contiguous(NAME, query=query, key=key, value=value, atten_mask=atten_mask, block_table=block_table)
    num_kv_heads = num_key_value_heads or num_heads
    _check_heads(query, num_heads, num_kv_heads)
    lens = lengths(actual_seq_lengths, actual_seq_lengths_kv, query.shape[0], block_table is not None)
    if block_table is not None:
        _check_paged(query, key, value, block_table, block_size, num_kv_heads, lens.kv)
    else:
        _check_packed(query, key, value, num_kv_heads, lens.kv)
    _check_mask(sparse_mode, atten_mask, pre_tokens, next_tokens)
    require(inner_precise in (0, 1, 2, 3), NAME, "inner_precise must be 0 to 3", inner_precise)
