# SPDX-License-Identifier: Apache-2.0
"""Writing to and reading from a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import refuse, require, require_absent, require_contiguous

_INDICES = (torch.int32, torch.int64)


def check_scatter(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Source: op-plugin docs, npu_scatter_pa_kv_cache, first case; cache (blocks, block, heads, dim): vllm-ascend."""
    name = "npu_scatter_pa_kv_cache"
    require_absent(name, compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    if cache_mode not in (None, "Norm"):
        refuse(name, 'a cache in ND layout needs cache_mode="Norm"; the default "PA_NZ" is for NZ', cache_mode)
    tensors = (key, value, key_cache, value_cache)
    require(len({t.dtype for t in tensors}) == 1, name, "all must have one dtype", [t.dtype for t in tensors])
    require_contiguous(
        name, key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping
    )
    require(slot_mapping.dtype in _INDICES, name, "slot_mapping must be int32 or int64", slot_mapping.dtype)
    shapes = [tuple(t.shape) for t in tensors]
    require([len(shape) for shape in shapes] == [3, 3, 4, 4], name, "key must have 3 axes, a cache 4", shapes)
    require(shapes[0][:2] == shapes[1][:2], name, "key and value must have the same tokens and heads", shapes[:2])
    require(shapes[2][:2] == shapes[3][:2], name, "the caches must have the same blocks", shapes[2:])
    fits = all(rows[1:] == cached[2:] for rows, cached in zip(shapes[:2], shapes[2:], strict=True))
    require(fits, name, "a cache must be (blocks, block_size, heads, head_dim)", shapes)
    tokens = tuple(slot_mapping.shape)
    require(tokens == shapes[0][:1], name, f"slot_mapping must be ({shapes[0][0]},)", tokens)


@kernel("npu_scatter_pa_kv_cache", "aclnnScatterPaKvCache", check=check_scatter)
def scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **others: object
) -> None:
    """Write row i of key and value to slot `slot_mapping[i]`; CANN promises nothing for a slot given twice."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    slots = slot_mapping.long()
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
        refuse(
            "npu_scatter_pa_kv_cache",
            f"slots must be in [0, {num_slots - 1}]",
            f"{int(slots.min())} to {int(slots.max())}",
        )
    if len(set(slots.tolist())) != slots.numel():
        refuse("npu_scatter_pa_kv_cache", "slots must be unique", sorted(slots.tolist())[:16])
    key_cache.flatten(0, 1)[slots] = key
    value_cache.flatten(0, 1)[slots] = value


def check_gather(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Source: op-plugin, test_npu_gather_pa_kv_cache.py."""
    name = "npu_gather_pa_kv_cache"
    require_absent(name, seq_offset=seq_offset, is_seq_lens_cumsum=is_seq_lens_cumsum)
    tensors = (key_cache, value_cache, key, value)
    require(len({t.dtype for t in tensors}) == 1, name, "all must have one dtype", [t.dtype for t in tensors])
    require_contiguous(name, key_cache=key_cache, value_cache=value_cache, key=key, value=value)
    indices = (block_tables.dtype, seq_lens.dtype)
    require(indices[0] == indices[1] and indices[0] in _INDICES, name, "indices must be int32 or int64", indices)
    require(block_tables.dim() == 2, name, "block_tables must have 2 axes", tuple(block_tables.shape))
    require(seq_lens.shape == block_tables.shape[:1], name, "seq_lens must have a length per row", seq_lens.shape)
    fits = key.shape[1:] == key_cache.shape[2:] and value.shape[1:] == value_cache.shape[2:]
    require(fits, name, "rows must fit the caches", (tuple(key.shape), tuple(key_cache.shape)))


@kernel("npu_gather_pa_kv_cache", "aclnnGatherPaKvCache", check=check_gather)
def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    **others: object,
) -> None:
    """Lay the first `seq_lens[i]` rows of every sequence end to end; blocks that do not exist read as zeros."""
    num_blocks, block_size = key_cache.shape[:2]
    start = 0
    for table, length in zip(block_tables.long(), seq_lens.tolist(), strict=True):
        length = min(length, key.shape[0] - start)
        rows = torch.arange(length)
        inside = rows // block_size < table.numel()
        blocks = table[(rows // block_size).clamp(max=table.numel() - 1)]
        exists = inside & (blocks >= 0) & (blocks < num_blocks)
        slots = blocks.clamp(0, num_blocks - 1) * block_size + rows % block_size
        for cache, target in ((key_cache, key), (value_cache, value)):
            found = cache.flatten(0, 1)[slots]
            target[start : start + length] = found * exists.view(-1, *[1] * (found.dim() - 1)).to(found.dtype)
        start += length
