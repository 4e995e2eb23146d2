# SPDX-License-Identifier: Apache-2.0
"""Paged attention through npu_fused_infer_attention_score: the lengths of a step on the host, and the call.

The operator takes lengths as host lists: query lengths summed up, and, since keys are paged, each sequence's own number
of keys. Rows of all sequences lie end to end (layout TND), and masks are aligned to each sequence's last key.
Source: cann/ops-transformer, attention/fused_infer_attention_score: its tiling (`pagedCacheFlag`) and its tests, which
sum up key lengths only where keys are not paged.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaflash.ops.metadata import AttentionMetadata, PackedBatch, device_tensor
from adaflash_ascend.limits import check_query_ends

MASK_SIZE = 2048
UNBOUNDED = 2**31 - 1

# Values of `sparse_mode`.
NO_MASK = 0
CAUSAL = 3  # lower triangle through the bottom right corner
BAND = 4  # keys from `pre_tokens` before to `next_tokens` behind the own position, both included


@dataclass(frozen=True)
class AscendAttentionMetadata(AttentionMetadata):
    """Lengths of the sequences that have queries, as the operator takes them.

    Attributes:
        query_ends: Prefix sums of the query lengths, without the leading 0.
        key_lens: Number of keys of each, this step's tokens included.
        tables: [sequences, max_blocks] int32 block tables.
        max_query_len: The longest query.
    """

    query_ends: list[int]
    key_lens: list[int]
    tables: Tensor
    max_query_len: int


class Sparsity(NamedTuple):
    """Which keys a query sees, as arguments of the operator; see `sparsity`."""

    mode: int
    pre_tokens: int
    next_tokens: int


def build_metadata(batch: PackedBatch) -> AscendAttentionMetadata:
    """Lay out a batch's lengths; reads nothing back from the device."""
    query_lens, key_lens, tables = batch.query_lens_cpu, batch.seq_lens_cpu, batch.block_tables
    kept = [s for s, query_len in enumerate(query_lens) if query_len]
    if len(kept) < len(query_lens):
        query_lens, key_lens = [query_lens[s] for s in kept], [key_lens[s] for s in kept]
        tables = tables.index_select(0, device_tensor(np.array(kept, dtype=np.int64), tables.device))
    return AscendAttentionMetadata(
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_tables,
        batch.query_lens_cpu,
        batch.seq_lens_cpu,
        batch.block_tables_cpu,
        query_ends=list(accumulate(query_lens)),
        key_lens=key_lens,
        tables=tables,
        max_query_len=max(query_lens, default=0),
    )


def compressed_mask(device: torch.device) -> Tensor:
    """Return the mask that modes 3 and 4 are given whatever the lengths: [2048, 2048] bool, True above the diagonal."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1).to(device)


def sparsity(causal: bool, window: int | None, max_query_len: int) -> Sparsity:
    """Return the arguments for a mask.

    A window holds the own position, the operator's `pre_tokens` does not: it hides keys at positions
    <= own - pre_tokens - 1, and so is window - 1. Source: `create_select_mask` of the tests named above.
    """
    if window is None:
        return Sparsity(CAUSAL if causal else NO_MASK, UNBOUNDED, UNBOUNDED)
    return Sparsity(BAND, window - 1, 0 if causal else max_query_len - 1)


def attention_arguments(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, scale: float, mask: Tensor, keys: Sparsity
) -> dict[str, Any]:
    """Return the operator's arguments but for lengths; the same for all steps with these tensors.

    Args:
        q: [T, Hq, D] with T rows in sequences, contiguous.
        k_cache: [num_blocks, block_size, Hkv, D], contiguous.
        v_cache: Same shape.
        tables: [sequences, max_blocks] int32.
        scale: Multiplies q . k.
        mask: `compressed_mask`.
        keys: Which keys are seen.
    """
    block_size, num_kv_heads = k_cache.shape[1:3]
    return {
        "query": q,
        "key": k_cache.flatten(2),
        "value": v_cache.flatten(2),
        "atten_mask": None if keys.mode == NO_MASK else mask,
        "block_table": tables,
        "num_heads": q.shape[1],
        "num_key_value_heads": num_kv_heads,
        "scale": scale,
        "pre_tokens": keys.pre_tokens,
        "next_tokens": keys.next_tokens,
        "input_layout": "TND",
        "sparse_mode": keys.mode,
        "block_size": block_size,
    }


def length_arguments(meta: AscendAttentionMetadata) -> dict[str, list[int]]:
    """Return the operator's arguments that change with every step."""
    return {"actual_seq_lengths": meta.query_ends, "actual_seq_lengths_kv": meta.key_lens}


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AscendAttentionMetadata,
    scale: float,
    mask: Tensor,
    keys: Sparsity,
) -> Tensor:
    """Attend the rows of all sequences, [T, Hq, D] -> [T, Hq, D]; arguments as of `attention_arguments`."""
    check_query_ends(meta.query_ends, q.shape[0])
    attended: Tensor = torch.ops.npu.npu_fused_infer_attention_score(
        **attention_arguments(q, k_cache, v_cache, meta.tables, scale, mask, keys), **length_arguments(meta)
    )[0]
    return attended
