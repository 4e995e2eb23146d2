# SPDX-License-Identifier: Apache-2.0
"""Drafts blocks the way serving does, one sequence and one paged cache per block."""

from __future__ import annotations

import torch
from torch import Tensor

from adaflash.cache.kv_cache import KVCache
from adaflash.ops.metadata import SamplingMetadata
from adaflash.speculative.base import DraftBlock
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.packing import PackEntry, pack

BLOCK_SIZE, NUM_BLOCKS = 4, 32


def serve_block(
    drafter: DFlashDrafter, taps: Tensor, anchor: int, anchor_id: int, writer: DFlashDrafter | None = None
) -> DraftBlock:
    """Write the context before `anchor` (rows of `taps` [S - 1, ..]) and propose one block, logits kept.

    `writer` is the version that writes the context, if it is another.
    """
    config = drafter.config
    kv = KVCache.allocate(
        drafter.backend, config.num_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim, drafter.dtype
    )
    for cache in (*kv.k, *kv.v):
        cache.fill_(1e3)  # anything read that was not written shows
    table = list(reversed(range(NUM_BLOCKS)))
    context = pack([PackEntry([0] * anchor, 0, table, 0)], BLOCK_SIZE, drafter.backend.device)
    (writer or drafter).write_context(taps[:anchor], context.positions, context.slot_mapping, kv)
    block_ids = [anchor_id] + [drafter.mask_token_id] * (drafter.draft_block_size - 1)
    batch = pack([PackEntry(block_ids, anchor, table, 1)], BLOCK_SIZE, drafter.backend.device)
    sampling = SamplingMetadata.greedy(drafter.draft_block_size - 1)
    return drafter.propose(batch, kv, sampling, keep_logits=True)


def served_logits(
    drafter: DFlashDrafter, taps: Tensor, token_ids: Tensor, anchors: list[int], writer: DFlashDrafter | None = None
) -> Tensor:
    """Return the draft logits of every block, [A, K, Vd]."""
    blocks = [serve_block(drafter, taps, anchor, int(token_ids[anchor]), writer) for anchor in anchors]
    return torch.cat([block.logits for block in blocks if block.logits is not None])
